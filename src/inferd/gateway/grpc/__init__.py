"""KServe v2 over gRPC, imported only where ``server.grpc_port`` is set."""
