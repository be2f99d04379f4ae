"""``inferd registry digest``: the digests of a model's files."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from inferd.cli.registry.progress import reading


class DigestReport(msgspec.Struct):
    """What ``--json`` prints."""

    path: str
    digest: str
    tree_digest: str
    num_files: int
    num_bytes: int
    files: list[dict[str, str | int]]


@click.command("digest")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--ignore", "ignored", multiple=True, metavar="PATH", help="Leave out this path below the folder; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON with every file, for programs.")
def command(path: Path, ignored: tuple[str, ...], as_json: bool) -> None:
    """Print the digests of a file or folder, for models.NAME.verify.digest.

    The first covers the names and contents of all files. The second is the root digest of OMS v1.0 (OpenSSF Model
    Signing), which covers their contents alone. Git's files and model.sig at the top of the folder do not count.

    \b
    Examples:
      inferd registry digest ./my-model
      inferd registry digest ./model.onnx --json
    """
    from inferd.artefacts.manifest import manifest_of
    from inferd.artefacts.tree import BUNDLE_NAME

    with reading(f"Hashing {path.name}") as progress:
        manifest = manifest_of(path, ignored=(BUNDLE_NAME, *ignored), progress=progress)
    if not as_json:
        click.echo(manifest.tree_digest)
        click.echo(manifest.digest)
        return
    report = DigestReport(
        path=str(path),
        digest=manifest.digest,
        tree_digest=manifest.tree_digest,
        num_files=len(manifest.files),
        num_bytes=manifest.num_bytes,
        files=[{"path": file.path, "size": file.size, "sha256": file.sha256} for file in manifest.files],
    )
    click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
