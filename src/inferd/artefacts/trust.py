"""Whose signatures are accepted: a public key, or certificates that lead to given roots.

Keys are those of OMS v1.0: ECDSA on P-256, P-384 and P-521, with the SHA-2 of the curve's size. A chain of certificates
is checked as RFC 5280 asks, by ``cryptography``'s path validation. The signer's certificate must be valid now, be no
certificate of a chain's middle alone, and allow signatures (key usage digitalSignature, or code signing).

``cryptography`` is imported by the functions that need it.
"""

from __future__ import annotations

import contextlib
import hashlib
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from inferd.artefacts.bundle import Bundle
from inferd.artefacts.tree import not_verified
from inferd.errors import ModelLoadError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import HashAlgorithm

_CURVES: Final = ("secp256r1", "secp384r1", "secp521r1")
_MAX_PEM_BYTES: Final = 4 << 20  # of a file with keys or roots


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of a public key and a file of roots."""

    public_key: Path | None = None  # PEM
    roots: Path | None = None  # PEM, one or more certificates
    identity: str | None = None  # of the signer's certificate: a name in it; None: any


def check_signature(bundle: Bundle, trust: Trust, now: datetime) -> str:
    """The signer, as text for people. Raises ModelLoadError where the signature is not one of the trusted signers.

    ``now``: an aware time, at which certificates must be valid.
    """
    _require_cryptography()
    if trust.public_key is not None:
        if bundle.chain:
            raise refused(
                bundle, "was made with a certificate", "set certificate_chain_file instead of public_key_file"
            )
        key = public_key(trust.public_key)
        expected = key_hint(key)
        if bundle.key_hint is not None and bundle.key_hint != expected:
            raise refused(
                bundle,
                f"was made with the key {bundle.key_hint}, not with {expected} of {trust.public_key}",
                "have the model signed with the trusted key, or trust the other one",
            )
        signer = f"key {expected}"
    else:
        assert trust.roots is not None, "trust is a key or roots"
        if not bundle.chain:
            raise refused(bundle, "was made with a bare key", "set public_key_file instead of certificate_chain_file")
        certificate = _checked_chain(bundle, trust.roots, now)
        key = _signing_key(certificate.public_key(), bundle.where)
        if trust.identity is not None and trust.identity not in names_of(certificate):
            raise refused(
                bundle,
                f"was made by {', '.join(sorted(names_of(certificate)))}, not by {trust.identity}",
                "check verify.signature.identity",
            )
        signer = f"certificate {certificate.subject.rfc4514_string()}"
    _check_bytes(bundle, key)
    return signer


def public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """The public key of a PEM file. Raises ModelLoadError."""
    _require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        key = serialization.load_pem_public_key(read_pem(path))
    except (ValueError, UnsupportedAlgorithm):
        raise not_verified(f"{path} is no public key in PEM.", param="verify.signature") from None
    return _signing_key(key, str(path))


def signing_key(path: Path, password: bytes | None = None) -> ec.EllipticCurvePrivateKey:
    """The private key of a PEM file. Raises ModelLoadError."""
    _require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_private_key(read_pem(path), password)
    except TypeError:
        needed = "needs its password" if password is None else "has no password"
        raise not_verified(f"The private key {path} {needed}.", param="private_key") from None
    except (ValueError, UnsupportedAlgorithm):
        raise not_verified(
            f"{path} is no private key in PEM, or its password is another one.", param="private_key"
        ) from None
    _signing_key(key.public_key(), str(path))
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def key_hint(key: ec.EllipticCurvePublicKey) -> str:
    """OMS's fingerprint: SHA-256 of the key's PEM, in hexadecimal."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def hash_of(key: ec.EllipticCurvePublicKey) -> HashAlgorithm:
    """The hash that signatures of this key use."""
    from cryptography.hazmat.primitives import hashes

    sizes: dict[int, HashAlgorithm] = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}
    return sizes[key.curve.key_size]


def certificates(path: Path) -> list[x509.Certificate]:
    """The certificates of a PEM file. Raises ModelLoadError."""
    _require_cryptography()
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(read_pem(path))
    except ValueError as error:
        raise not_verified(f"{path} holds no certificate in PEM ({error}).", param="verify.signature") from None


def names_of(certificate: x509.Certificate) -> set[str]:
    """The subject's common names, and the alternative names that are texts: mail, DNS, URI."""
    from cryptography import x509

    named = {str(one.value) for one in certificate.subject.get_attributes_for_oid(x509.oid.NameOID.COMMON_NAME)}
    try:
        alternative = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return named
    for kind in (x509.RFC822Name, x509.DNSName, x509.UniformResourceIdentifier):
        named |= set(alternative.get_values_for_type(kind))
    return named


def read_pem(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_PEM_BYTES)
    except OSError as error:
        raise not_verified(
            f"{path} cannot be read ({error.strerror}); check the path.", param="verify.signature"
        ) from None


def refused(bundle: Bundle, reason: str, remedy: str) -> ModelLoadError:
    return not_verified(f"The signature {bundle.where} {reason}; {remedy}.", param="verify.signature")


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise not_verified(
            "Signatures need the package cryptography; install it with pip install 'inferd[signing]'.",
            param="verify.signature",
        ) from None


def _signing_key(key: object, where: str) -> ec.EllipticCurvePublicKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise not_verified(
            f"{where} has a key that is not on the curve P-256, P-384 or P-521; use one that is.",
            param="verify.signature",
        )
    return key


def _check_bytes(bundle: Bundle, key: ec.EllipticCurvePublicKey) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key.verify(bundle.signature, bundle.signed_bytes, ec.ECDSA(hash_of(key)))
    except InvalidSignature:
        raise refused(
            bundle,
            "is not valid: it was changed, or made with another key",
            "get it again from the signer, or have the model signed again",
        ) from None


def _checked_chain(bundle: Bundle, roots: Path, now: datetime) -> x509.Certificate:
    """The signer's certificate, after its way to a root was checked."""
    from cryptography import x509
    from cryptography.x509 import verification

    try:
        signer, *between = [x509.load_der_x509_certificate(one) for one in bundle.chain]
    except ValueError as error:
        raise refused(bundle, f"has a broken certificate ({error})", "sign the model again") from None
    everything = verification.ExtensionPolicy.permit_all()
    issuers = everything.require_present(
        x509.BasicConstraints, verification.Criticality.AGNOSTIC, _check_issuer
    ).may_be_present(x509.KeyUsage, verification.Criticality.AGNOSTIC, _check_issuer_usage)
    try:
        verifier = (
            verification.PolicyBuilder()
            .store(verification.Store(certificates(roots)))
            .time(now)
            .extension_policies(ca_policy=issuers, ee_policy=everything)
            .build_client_verifier()
        )
        verifier.verify(signer, between)
    except (verification.VerificationError, ValueError) as error:
        if not signer.not_valid_before_utc <= now <= signer.not_valid_after_utc:
            raise refused(
                bundle,
                f"has a certificate that is valid from {signer.not_valid_before_utc:%Y-%m-%d} to "
                f"{signer.not_valid_after_utc:%Y-%m-%d} only",
                "have the model signed with a valid certificate",
            ) from None
        raise refused(
            bundle, f"has no valid chain to a root of {roots} ({error})", "trust the signer's root, or sign again"
        ) from None
    if not _may_sign(signer):
        raise refused(
            bundle,
            "has a certificate that is not for signatures (key usage digitalSignature, or code signing)",
            "sign with another certificate",
        )
    return signer


def _check_issuer(policy: object, certificate: object, constraints: x509.BasicConstraints) -> None:
    if not constraints.ca:
        raise ValueError("an issuer is no certificate authority")


def _check_issuer_usage(policy: object, certificate: object, usage: x509.KeyUsage | None) -> None:
    if usage is not None and not usage.key_cert_sign:
        raise ValueError("an issuer may not sign certificates")


def _may_sign(certificate: x509.Certificate) -> bool:
    """Whether its key usage allows signatures of data. Where both extensions are there, both must."""
    from cryptography import x509

    allowed: list[bool] = []
    with contextlib.suppress(x509.ExtensionNotFound):
        allowed.append(certificate.extensions.get_extension_for_class(x509.KeyUsage).value.digital_signature)
    with contextlib.suppress(x509.ExtensionNotFound):
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        named = (x509.oid.ExtendedKeyUsageOID.CODE_SIGNING, x509.oid.ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE)
        allowed.append(any(one in usages for one in named))
    return bool(allowed) and all(allowed)
