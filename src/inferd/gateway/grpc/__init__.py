"""KServe v2 over gRPC, imported only where ``server.grpc_port`` is set."""

from __future__ import annotations

import os

# Read when grpcio is first imported. Workers are other programs, so nothing of it need survive a fork; what it would
# say of one is not for a server's log.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
