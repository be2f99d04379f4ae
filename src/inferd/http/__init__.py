"""The HTTP server: HTTP/1.1, HTTP/2, TLS and WebSocket on listening sockets.

Knows framing, time limits and flow control (RFC 9110, 9112, 9113, 6455). Does not know routes, dialects,
models or keys: an application receives whole requests (``exchange.Exchange``) or ASGI messages (``asgi``).
Read first: ``listener.py``, then ``connection.py`` and ``exchange.py``.
"""
