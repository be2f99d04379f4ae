"""``inferd registry sign``: sign a model's files."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from inferd.cli.registry.progress import reading

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class SignReport(msgspec.Struct):
    """What ``--json`` prints."""

    path: str
    signature: str
    digest: str
    num_resources: int


@click.command("sign")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--private-key", type=_FILE, required=True, help="The private key in PEM: P-256, P-384 or P-521.")
@click.option("--password-file", type=_FILE, help="The private key's password, in the first line of a file.")
@click.option("--certificate", type=_FILE, help="The key's certificate in PEM, so that verifiers need only its root.")
@click.option("--certificate-chain", type=_FILE, help="The issuers between the certificate and its root, in PEM.")
@click.option(
    "--signature",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write.  [default: model.sig in the folder, or the file's name with .sig]",
)
@click.option("--ignore", "ignored", multiple=True, metavar="PATH", help="Leave out this path below the folder.")
@click.option("--shard-size", type=click.IntRange(min=4096), help="Sign parts of so many bytes, not whole files.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def command(
    path: Path,
    private_key: Path,
    password_file: Path | None,
    certificate: Path | None,
    certificate_chain: Path | None,
    signature: Path | None,
    ignored: tuple[str, ...],
    shard_size: int | None,
    as_json: bool,
) -> None:
    """Sign a file or folder by OMS v1.0 (OpenSSF Model Signing).

    \b
    Examples:
      openssl ecparam -name prime256v1 -genkey -noout -out release.key
      openssl ec -in release.key -pubout -out release.pub
      inferd registry sign ./my-model --private-key release.key
    """
    from inferd.artefacts.signature import sign

    if certificate_chain is not None and certificate is None:
        raise click.UsageError("--certificate-chain leads from a certificate to its root; give --certificate too.")
    password = None if password_file is None else password_file.read_bytes().partition(b"\n")[0].rstrip(b"\r")
    with reading(f"Signing {path.name}") as progress:
        target, statement = sign(
            path,
            private_key,
            bundle=signature,
            certificate=certificate,
            chain=certificate_chain,
            password=password,
            ignored=ignored,
            shard_size=shard_size,
            progress=progress,
        )
    count = len(statement.predicate.resources)
    if as_json:
        report = SignReport(str(path), str(target), statement.digest, count)
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
        return
    what = "file" if shard_size is None else "shard"
    click.echo(f"{target} signs {count} {what}{'s' * (count != 1)} of {path}: {statement.digest}")
