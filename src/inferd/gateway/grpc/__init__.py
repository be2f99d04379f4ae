"""The inference APIs over gRPC: KServe v2 with Triton's extensions, health, reflection and KEDA's scaler.

Knows gRPC's calls and the protocol's messages as bytes. Does not know frames (``inferd.http.http2``) or tensors.
Read first: ``server.py``, then ``calls.py`` and ``inference.py``.
"""
