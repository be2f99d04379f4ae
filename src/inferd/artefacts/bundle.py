"""The file of a signature: a Sigstore bundle v0.3 in JSON with a DSSE envelope.

Knows the JSON of both (docs.sigstore.dev/about/bundle, secure-systems-lab/dsse v1.0.0). Does not know what is signed,
and no keys.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Final

import msgspec

from inferd.artefacts.tree import not_verified
from inferd.errors import ModelLoadError

MEDIA_TYPE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
MAX_BYTES: Final = 64 << 20  # 65,536 files take about 20 MB


class _PublicKey(msgspec.Struct, omit_defaults=True, rename="camel"):
    hint: str | None = None
    raw_bytes: str | None = None  # of model_signing before 1.1


class _Certificate(msgspec.Struct, rename="camel"):
    raw_bytes: str


class _Chain(msgspec.Struct):
    certificates: list[_Certificate]


class _Material(msgspec.Struct, omit_defaults=True, rename="camel"):
    public_key: _PublicKey | None = None
    x509_certificate_chain: _Chain | None = msgspec.field(name="x509CertificateChain", default=None)
    certificate: _Certificate | None = None
    tlog_entries: list[msgspec.Raw] | None = None


class _Signature(msgspec.Struct, omit_defaults=True):
    sig: str
    keyid: str | None = None


class _Envelope(msgspec.Struct, rename="camel"):
    payload: str
    payload_type: str
    signatures: list[_Signature]


class _Document(msgspec.Struct, rename="camel"):
    media_type: str
    verification_material: _Material
    dsse_envelope: _Envelope


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """A signature with what it says of its signer, which is a hint and no proof."""

    where: str  # the file, for messages
    payload: bytes
    signature: bytes  # ECDSA in DER
    key_hint: str | None = None  # SHA-256 of the public key's PEM; None: not told
    chain: tuple[bytes, ...] = ()  # certificates in DER, the signer's first; empty: signed with a bare key

    @property
    def signed_bytes(self) -> bytes:
        """DSSE's pre-authentication encoding, which is what was signed."""
        return pae(self.payload)


def pae(payload: bytes) -> bytes:
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def read_bundle(path: Path) -> Bundle:
    """Read a signature's file. Raises ModelLoadError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _refused(
            str(path), f"cannot be read ({error.strerror})", "sign the model, or name its signature"
        ) from None
    return decode_bundle(data, str(path))


def decode_bundle(data: bytes, where: str) -> Bundle:
    """A signature from its JSON. ``where``: its file, for messages. Raises ModelLoadError."""
    if len(data) > MAX_BYTES:
        raise _refused(where, f"has more than {MAX_BYTES} bytes", "check the path")
    try:
        document = msgspec.json.decode(data, type=_Document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(where, f"is no Sigstore bundle ({error})", "check the path") from None
    if document.media_type != MEDIA_TYPE:
        raise _refused(where, f"has the media type {document.media_type!r}, not {MEDIA_TYPE!r}", "sign the model again")
    envelope, material = document.dsse_envelope, document.verification_material
    if envelope.payload_type != PAYLOAD_TYPE:
        raise _refused(where, f"signs {envelope.payload_type!r}, not {PAYLOAD_TYPE!r}", "give a model's signature")
    if len(envelope.signatures) != 1:
        raise _refused(where, f"has {len(envelope.signatures)} signatures instead of one", "sign the model again")
    kinds = [material.public_key, material.x509_certificate_chain, material.certificate]
    if sum(kind is not None for kind in kinds) != 1:
        raise _refused(where, "does not say how it was signed, or says it twice", "sign the model again")
    if material.certificate is not None:
        raise _refused(
            where,
            "was signed without a key (Sigstore with Fulcio and Rekor), which inferd does not verify",
            "verify it with model_signing verify sigstore and pin verify.digest, or sign with a key or a certificate",
        )
    chain = material.x509_certificate_chain.certificates if material.x509_certificate_chain is not None else []
    if material.x509_certificate_chain is not None and not 0 < len(chain) <= 16:
        raise _refused(where, f"has {len(chain)} certificates", "sign the model again")
    return Bundle(
        where=where,
        payload=_decoded(envelope.payload, where),
        signature=_decoded(envelope.signatures[0].sig, where),
        key_hint=material.public_key.hint if material.public_key is not None else None,
        chain=tuple(_decoded(one.raw_bytes, where) for one in chain),
    )


def encode_bundle(bundle: Bundle) -> bytes:
    """The JSON of a signature."""
    material = _Material(tlog_entries=[])
    if bundle.chain:
        material.x509_certificate_chain = _Chain([_Certificate(_encoded(one)) for one in bundle.chain])
    else:
        material.public_key = _PublicKey(hint=bundle.key_hint)
    envelope = _Envelope(_encoded(bundle.payload), PAYLOAD_TYPE, [_Signature(_encoded(bundle.signature), "")])
    return msgspec.json.encode(_Document(MEDIA_TYPE, material, envelope)) + b"\n"


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decoded(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _refused(where, "has a part that is no Base64", "copy the signature again") from None


def _refused(where: str, reason: str, remedy: str) -> ModelLoadError:
    return not_verified(f"The signature {where} {reason}; {remedy}.", param="verify.signature")
