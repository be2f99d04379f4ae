"""``inferd registry verify``: whether a model's files are what a digest or a signature says."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from inferd.cli.registry.progress import reading
from inferd.cli.terminal import fail
from inferd.errors import ModelLoadError

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class VerifyReport(msgspec.Struct):
    """What ``--json`` prints."""

    path: str
    verified: bool
    evidence: str = ""
    problem: str = ""
    digest: str = ""
    tree_digest: str = ""
    num_files: int = 0
    num_bytes: int = 0


@click.command("verify")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--digest", metavar="DIGEST", help="The digest that inferd registry digest printed: tree-sha256:... .")
@click.option(
    "--signature",
    type=_FILE,
    help="The signature's file.  [default: model.sig in the folder, or the file's name with .sig]",
)
@click.option("--public-key", type=_FILE, help="The signer's public key in PEM.")
@click.option("--certificate-chain", type=_FILE, help="Trusted roots in PEM, for a signer with a certificate.")
@click.option("--identity", metavar="NAME", help="A name that the signer's certificate must have.")
@click.option("--ignore-unsigned-files", is_flag=True, help="Accept further files that were not signed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def command(
    path: Path,
    digest: str | None,
    signature: Path | None,
    public_key: Path | None,
    certificate_chain: Path | None,
    identity: str | None,
    ignore_unsigned_files: bool,
    as_json: bool,
) -> None:
    """Compare a file or folder with its digest, or with its signature by OMS v1.0 (OpenSSF Model Signing).

    The exit code is 0 where all that was asked holds, and 1 where it does not.

    \b
    Examples:
      inferd registry verify ./my-model --public-key release.pub
      inferd registry verify ./my-model --certificate-chain roots.pem
      inferd registry verify ./model.onnx --digest tree-sha256:4f0c...
    """
    from inferd.artefacts.manifest import is_digest
    from inferd.artefacts.policy import Policy, verify
    from inferd.artefacts.signature import default_bundle
    from inferd.artefacts.trust import Trust

    if digest is None and public_key is None and certificate_chain is None:
        raise click.UsageError("Say what to compare with: --digest, --public-key or --certificate-chain.")
    if public_key is not None and certificate_chain is not None:
        raise click.UsageError("Give --public-key or --certificate-chain, by the way in which the model was signed.")
    if digest is not None and not is_digest(digest):
        raise click.UsageError(
            f"{digest!r} is no digest such as tree-sha256:4f0c...; inferd registry digest prints it."
        )
    if identity is not None and certificate_chain is None:
        raise click.UsageError("--identity is a name in a certificate; give --certificate-chain too.")
    policy = Policy(digest=digest)
    if public_key is not None or certificate_chain is not None:
        policy = Policy(
            digest=digest,
            bundle=signature or default_bundle(path),
            trust=Trust(public_key=public_key, roots=certificate_chain, identity=identity),
            ignore_unsigned=ignore_unsigned_files,
        )
    try:
        with reading(f"Verifying {path.name}") as progress:
            found = verify(path, policy, progress=progress)
    except ModelLoadError as error:
        if as_json:
            _print_json(VerifyReport(str(path), False, problem=error.message))
        else:
            fail(error.message)
        raise click.exceptions.Exit(1) from None
    if as_json:
        manifest = found.manifest
        _print_json(
            VerifyReport(
                path=str(path),
                verified=True,
                evidence=found.evidence,
                digest=manifest.digest,
                tree_digest=manifest.tree_digest,
                num_files=len(manifest.files),
                num_bytes=manifest.num_bytes,
            )
        )
        return
    count = len(found.manifest.files)
    click.echo(f"{path} verifies: {found.evidence}; {count} file{'s' * (count != 1)}, {found.manifest.tree_digest}")


def _print_json(report: VerifyReport) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
