"""Certificates for tests, made where they are needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def made_certificate(folder: Path, name: str = "far") -> Path:
    """For 127.0.0.1 alone, its own authority: ``cert.pem``, with ``key.pem`` beside it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed, which makes the certificate")
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    words += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    words += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([openssl, *words], check=True, capture_output=True)
    return folder / "cert.pem"
