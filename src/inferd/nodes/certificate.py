"""The certificate that nodes are shown: the operator's, or one that is made once and kept.

A node knows it by its fingerprint, which is part of the token, so no authority has to vouch for it.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
from pathlib import Path
from typing import NamedTuple

from inferd.config import NodesConfig
from inferd.errors import ConfigError

_YEARS = 10


class Shown(NamedTuple):
    """A listener's certificate."""

    context: ssl.SSLContext
    fingerprint: bytes  # SHA-256 of the certificate's DER form


def certificate_for(config: NodesConfig, folder: Path) -> Shown:
    """The configured certificate, or the one in ``folder``, which is made where it is missing. Raises ConfigError."""
    if config.certificate is not None:
        chain = Path(config.certificate).expanduser()
        key = chain if config.key is None else Path(config.key).expanduser()
    else:
        chain = key = folder / "certificate.pem"
        if not chain.exists():
            try:
                make_certificate(chain)
            except OSError as error:
                raise ConfigError(
                    f"The certificate for nodes cannot be written to {chain} ({error.strerror}); make room there, or "
                    "name another folder with state.data_dir.",
                    param="state.data_dir",
                ) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(chain, key, _no_password)
        fingerprint = fingerprint_of(chain)
    except (OSError, ValueError) as error:
        if config.certificate is None:
            raise ConfigError(
                f"The file {chain} with the certificate that nodes are shown cannot be used ({error}); delete it, and "
                "another one is made. Nodes join that one with new tokens (inferd node token).",
                param="nodes.listen",
            ) from None
        raise ConfigError(
            f"nodes.certificate: {chain} and {key} are no certificate and key in PEM form, without a password "
            f"({error}); name others, or leave the setting out.",
            param="nodes.certificate",
        ) from None
    return Shown(context, fingerprint)


def fingerprint_of(chain: Path) -> bytes:
    """SHA-256 of the DER form of a PEM file's first certificate. Raises OSError, ValueError."""
    first = chain.read_text("ascii").split("-----END CERTIFICATE-----")[0]
    der = ssl.PEM_cert_to_DER_cert("-----BEGIN" + first.split("-----BEGIN")[-1] + "-----END CERTIFICATE-----\n")
    return hashlib.sha256(der).digest()


def _no_password() -> str:
    raise ValueError("the key has a password")


def client_context() -> ssl.SSLContext:
    """What a node connects with. It compares the fingerprint itself, before it sends anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def make_certificate(path: Path) -> None:
    """Make a certificate and its key, P-256, in one file that this user alone can read. Raises ConfigError, OSError."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    except ModuleNotFoundError:
        raise ConfigError(
            "Nodes are shown a certificate, and the package cryptography, which makes one, is not installed; "
            "pip install 'inferd[nodes]', or set nodes.certificate.",
            param="nodes.certificate",
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "inferd nodes")])
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin)
    certificate = builder.not_valid_after(begin + datetime.timedelta(days=365 * _YEARS)).sign(key, SHA256())
    part = path.with_name(f"{path.name}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        file.write(certificate.public_bytes(Encoding.PEM))
    os.replace(part, path)
