"""What a model's files must be before they are loaded. ``registry/verified.py`` follows it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from inferd.config.section import Section


class SignatureConfig(Section, frozen=True, kw_only=True):
    """The signature of a model by OMS v1.0 (OpenSSF Model Signing), and whose it must be."""

    bundle: Annotated[
        str | None,
        Meta(
            description="The signature's file; a relative path is below the model's folder, or beside a model of one "
            "file. Unset: model.sig, or the file's name with .sig."
        ),
    ] = None
    public_key_file: Annotated[
        str | None, Meta(description="The signer's public key in PEM: P-256, P-384 or P-521.")
    ] = None
    certificate_chain_file: Annotated[
        str | None,
        Meta(description="Trusted roots in PEM, to one of which the signer's certificate must lead."),
    ] = None
    identity: Annotated[
        str | None,
        Meta(
            description="A name that the signer's certificate must have: its common name, or an alternative name. "
            "Unset: any certificate below the roots."
        ),
    ] = None


class VerifyConfig(Section, frozen=True, kw_only=True):
    """What the files of the model must be. Unset: they are loaded as they are found."""

    mode: Annotated[
        Literal["enforce", "warn", "off"],
        Meta(
            description="enforce: a verified copy is loaded, or nothing. warn: a model that does not verify is loaded "
            "from where it is, and the log, the status and a metric say so. off: nothing is verified."
        ),
    ] = "enforce"
    digest: Annotated[
        Annotated[str, Meta(pattern=r"^(tree-)?sha256:[0-9a-f]{64}$")] | None,
        Meta(description="The digest of the files, as inferd registry digest prints it."),
    ] = None
    signature: SignatureConfig | None = None
    ignore_unsigned_files: Annotated[
        bool, Meta(description="Files that are not signed are no reason to refuse the model; they are not loaded.")
    ] = False
