"""The HTTP server: HTTP/1.1, HTTP/2, TLS and WebSocket on listening sockets.

Knows framing, time limits and flow control (RFC 9110, RFC 9112, RFC 9113 and RFC 6455). Does not know routes, dialects,
models or keys: an application gets requests as ``exchange.Exchange`` or as ASGI messages (``asgi``).
Read first: ``listener.py``, then ``connection.py`` and ``exchange.py``.
"""
