"""A small HTTP server of a test, in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """Answer requests until the end of the block, without a log; yields the port."""
    quiet = type("Quiet", (handler,), {"log_message": lambda *words: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), quiet)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
