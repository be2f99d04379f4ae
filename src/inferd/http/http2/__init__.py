"""HTTP/2 (RFC 9113) for a server of gRPC calls. Imported only where ``server.grpc_port`` is set.

Knows frames, header compression (HPACK, RFC 7541), flow control, time limits and the cost of input (``http.cost``).
Does not know gRPC: ``inferd.gateway.grpc`` implements calls as a subclass of ``Stream``.
Read first: ``connection.py``, then ``stream.py``.
"""
