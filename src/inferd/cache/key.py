"""Cache keys: equal for equal requests of one tenant to one version of a model.

Knows which fields of a request affect only the delivery of its answer. Does not know which answers may be cached, or
where they are stored.
"""

from __future__ import annotations

import hashlib

import msgspec

TENANT_BYTES = 16
"""The length of a key's first part, which stands for the tenant."""

# Fields that affect the delivery of an answer and not its content. Whether it is streamed is a part of the key,
# because the stored bytes differ.
_DELIVERY = ("stream", "stream_options", "timeout", "priority", "request_id")

_decode = msgspec.json.Decoder(dict[str, object]).decode
_encode = msgspec.json.Encoder(order="sorted").encode


def tenant_digest(tenant: str) -> bytes:
    """The first bytes of all keys of a tenant."""
    return hashlib.blake2b(tenant.encode(), digest_size=TENANT_BYTES, person=b"inferd.tenant").digest()


def canonical(body: bytes | msgspec.Struct) -> bytes:
    """The same bytes for bodies with the same meaning.

    The order of fields, spaces, and the difference between null and an absent field have no effect. In a decoded
    request (a struct) an explicit default has no effect either. The last of repeated fields counts, as in a
    decoded request.

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
    """48 bytes: the digest of the tenant, then the digest of everything that determines the answer.

    ``fingerprint`` changes with everything that changes the model's answers (weights, number format). ``is_exact``:
    bodies are compared by every byte, because tensors are too large to be decoded for the key.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"inferd.answer")
    content = body if is_exact and isinstance(body, bytes) else canonical(body)
    for part in (model.encode(), fingerprint.encode(), path.encode(), b"s" if stream else b"w", content):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return tenant_digest(tenant) + digest.digest()
