"""``inferd registry verify``: whether files, or those of a version, are what a digest or a signature says."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from inferd import clock
from inferd.cli.registry.opened import actor, changing, common, print_json
from inferd.cli.registry.progress import reading
from inferd.cli.terminal import fail
from inferd.config.versioning import SignatureConfig, VerifyConfig
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
@click.argument("what", metavar="PATH|NAME@VERSION")
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
@common
def command(
    what: str,
    digest: str | None,
    signature: Path | None,
    public_key: Path | None,
    certificate_chain: Path | None,
    identity: str | None,
    ignore_unsigned_files: bool,
    file: Path | None,
    as_json: bool,
) -> int:
    """Compare a file or folder with its digest, or with its signature by OMS v1.0 (OpenSSF Model Signing).

    The files of a registered version are compared with the registered digest, and with a signature by the options here
    or by registry.verify of the config file. What was found becomes the version's evidence, and a version that was only
    registered is verified then.

    The exit code is 0 where all that was asked holds, and 1 where it does not.

    \b
    Examples:
      inferd registry verify ./my-model --public-key release.pub
      inferd registry verify ./my-model --certificate-chain roots.pem
      inferd registry verify ./model.onnx --digest tree-sha256:4f0c...
      inferd registry verify churn@3 --public-key release.pub
    """
    from inferd.artefacts.manifest import is_digest
    from inferd.artefacts.policy import Policy, verify
    from inferd.artefacts.signature import default_bundle
    from inferd.artefacts.trust import Trust

    path, is_version = Path(what), not Path(what).exists() and "@" in what
    if is_version and digest is not None:
        raise click.UsageError("A version has its digest in the registry; leave --digest out.")
    if not is_version and not path.exists():
        raise click.BadParameter(f"There is no file or folder {what!r}, and a version is NAME@VERSION: churn@3.")
    if not is_version and digest is None and public_key is None and certificate_chain is None:
        raise click.UsageError("Say what to compare with: --digest, --public-key or --certificate-chain.")
    if public_key is not None and certificate_chain is not None:
        raise click.UsageError("Give --public-key or --certificate-chain, by the way in which the model was signed.")
    if digest is not None and not is_digest(digest):
        raise click.UsageError(
            f"{digest!r} is no digest such as tree-sha256:4f0c...; inferd registry digest prints it."
        )
    if identity is not None and certificate_chain is None:
        raise click.UsageError("--identity is a name in a certificate; give --certificate-chain too.")
    if is_version:
        asked = None
        if public_key is not None or certificate_chain is not None:
            named = [None if one is None else str(one.absolute()) for one in (signature, public_key, certificate_chain)]
            asked = VerifyConfig(
                signature=SignatureConfig(
                    bundle=named[0], public_key_file=named[1], certificate_chain_file=named[2], identity=identity
                ),
                ignore_unsigned_files=ignore_unsigned_files,
            )
        return _verify_version(what, asked, file, as_json)
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
            print_json(VerifyReport(str(path), False, problem=error.message))
        else:
            fail(error.message)
        return 1
    if as_json:
        manifest = found.manifest
        print_json(
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
        return 0
    count = len(found.manifest.files)
    click.echo(f"{path} verifies: {found.evidence}; {count} file{'s' * (count != 1)}, {found.manifest.tree_digest}")
    return 0


def _verify_version(what: str, asked: VerifyConfig | None, file: Path | None, as_json: bool) -> int:
    """Read the files of a version, and record what was found. ``asked``: the signature; None: by the config file."""
    from inferd.lifecycle import registry
    from inferd.lifecycle.actions import policy_of
    from inferd.lifecycle.files import read_files

    with changing(file, "verify", what) as (database, config, found):
        settings = config.registry.verify if asked is None else asked
        with reading(f"Verifying {found.source}") as progress:
            read = read_files(found.source, found.digest, settings, progress)
        after = registry.verify(
            *(database, found.name, found.version, read.findings),
            actor=actor(),
            now=clock.wall(),
            policy=policy_of(config.registry),
        )
    if as_json:
        print_json(after)
    else:
        verdict = "is" if read.is_whole else "does not verify, and stays"
        click.echo(f"{after.name}@{after.version} {verdict} {after.record.stage}: {read.words}.")
    return 0 if read.is_whole else 1
