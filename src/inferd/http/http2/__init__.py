"""HTTP/2 (RFC 9113) for a server of calls, on uvloop. Imported only where ``server.grpc_port`` is set.

Knows frames, header compression (RFC 7541), windows and one cost budget for each connection (``http.cost``).
Does not know gRPC, which is one user of its streams. Read first: ``connection.py``, then ``stream.py``.
"""
