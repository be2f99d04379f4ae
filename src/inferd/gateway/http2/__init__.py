"""HTTP/2 (RFC 9113) as a server of calls needs it, on uvloop; imported only where ``server.grpc_port`` is set."""
