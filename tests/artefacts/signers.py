"""Keys and certificates for signatures, made where they are needed."""

from __future__ import annotations

import functools
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NOW = datetime(2026, 6, 1, tzinfo=UTC)
CURVES: dict[str, type[ec.EllipticCurve]] = {"P-256": ec.SECP256R1, "P-384": ec.SECP384R1, "P-521": ec.SECP521R1}


@functools.cache
def key(curve: str = "P-256", number: int = 0) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(CURVES[curve]())


def private_pem(folder: Path, made: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> Path:
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password)
    path = folder / f"{id(made)}.key"
    path.write_bytes(
        made.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption),
    )
    return path


def public_pem(folder: Path, made: ec.EllipticCurvePrivateKey) -> Path:
    path = folder / f"{id(made)}.pub"
    path.write_bytes(
        made.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return path


def certificate(
    subject: str,
    own: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None = None,
    issuer_key: ec.EllipticCurvePrivateKey | None = None,
    *,
    is_ca: bool = False,
    path_length: int | None = None,
    digital_signature: bool = True,
    usages: tuple[x509.ObjectIdentifier, ...] = (),
    begin: datetime = NOW - timedelta(days=30),
    end: datetime = NOW + timedelta(days=30),
    email: str | None = None,
    has_key_usage: bool = True,
) -> x509.Certificate:
    """A certificate for ``own``, signed by the issuer or by itself."""
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, subject)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer.subject if issuer is not None else name)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(is_ca, path_length), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
    )
    if has_key_usage:
        usage = x509.KeyUsage(digital_signature, False, False, False, False, is_ca, is_ca, False, False)
        builder = builder.add_extension(usage, critical=True)
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    if email is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.RFC822Name(email)]), critical=False)
    return builder.sign(issuer_key or own, hashes.SHA256())


def pem(folder: Path, name: str, *certificates: x509.Certificate) -> Path:
    path = folder / name
    path.write_bytes(b"".join(one.public_bytes(serialization.Encoding.PEM) for one in certificates))
    return path
