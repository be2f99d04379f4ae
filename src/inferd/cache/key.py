"""The name under which an answer is kept: equal requests of one tenant to one version of a model.

Knows which fields of a request say how it is answered rather than what. Does not know which requests
may be kept at all, nor where answers are.
"""

from __future__ import annotations

import hashlib

import msgspec

TENANT_BYTES = 16
"""So many first bytes of a key stand for the tenant."""

# How an answer travels and when it is worthless; never what it says. Whether it is streamed is part of
# the key all the same, as the form that the kept bytes have.
_DELIVERY = ("stream", "stream_options", "timeout", "priority")

_decode = msgspec.json.Decoder(dict[str, object]).decode
_encode = msgspec.json.Encoder(order="sorted").encode


def tenant_digest(tenant: str) -> bytes:
    """What a tenant's keys begin with."""
    return hashlib.blake2b(tenant.encode(), digest_size=TENANT_BYTES, person=b"inferd.tenant").digest()


def canonical(body: bytes | msgspec.Struct) -> bytes:
    """The same bytes for requests that ask for the same.

    The order of fields does not matter, nor spaces, nor whether a field is null or absent. Of a decoded
    request (a struct) it does not matter either whether a default was written out. Of fields given twice
    the last one counts, as it does where requests are decoded.

    Raises:
        msgspec.DecodeError: ``body`` is not a JSON object.
    """
    fields = _decode(body if isinstance(body, bytes) else msgspec.json.encode(body))
    for name in _DELIVERY:
        fields.pop(name, None)
    return _encode({name: value for name, value in fields.items() if value is not None})


def cache_key(
    tenant: str,
    model: str,
    fingerprint: str,
    path: str,
    body: bytes | msgspec.Struct,
    *,
    stream: bool = False,
    is_exact: bool = False,
) -> bytes:
    """48 bytes: the tenant's digest, then that of everything that decides what the answer is. ``is_exact``: the
    body is told apart by every byte, as tensors are too large to be read for it.

    ``fingerprint`` changes when the model would answer otherwise (its weights, its number format).
    """
    digest = hashlib.blake2b(digest_size=32, person=b"inferd.answer")
    content = body if is_exact and isinstance(body, bytes) else canonical(body)
    for part in (model.encode(), fingerprint.encode(), path.encode(), b"s" if stream else b"w", content):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return tenant_digest(tenant) + digest.digest()
