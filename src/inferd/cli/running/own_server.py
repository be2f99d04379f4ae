"""A server of a command's own, as a process that ends with the command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from inferd.cli.main import main
from inferd.cli.terminal import loading
from inferd.errors import ModelLoadError
from inferd.machine.parent import die_with

_STOP_S: Final = 40.0


@contextlib.contextmanager
def own_server(source: str, flags: Sequence[str] = (), settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """``inferd serve`` of a source on a free port for as long as it is needed; yields its address. ``settings``: of its
    environment. Raises ModelLoadError with the server's last sentence."""
    flags = ["--port", "0", "--no-access-log", "--log-format", "text", *flags]
    words = [sys.executable, "-m", __name__, str(os.getpid()), "serve", source, *flags]
    environment = {**os.environ, **(settings or {}), "TERM": "dumb"}
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, env=environment)
        try:
            with loading(f"Starting inferd serve {source}") as report_progress:
                report_progress("loading", 0, 0)
                address = _ready_address(server)
            if address is None:
                server.wait(timeout=_STOP_S)
                log.seek(0)
                said = log.read().decode("utf-8", "replace").strip().splitlines()
                reason = said[-1].removeprefix("Error: ") if said else f"it ended with code {server.returncode}"
                raise ModelLoadError(f"The server of {source} did not start: {reason}")
            yield address
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGINT)
                try:
                    server.wait(timeout=_STOP_S)
                except subprocess.TimeoutExpired:
                    server.kill()
                    server.wait()
            assert server.stdout is not None
            server.stdout.close()


def _ready_address(server: subprocess.Popen[bytes]) -> str | None:
    assert server.stdout is not None
    for line in server.stdout:
        words = line.decode().split()
        for beginning in (["inferd", "is", "ready", "at"], ["inferd", "listens", "at"]):
            if words[: len(beginning)] == beginning:
                return words[len(beginning)]
    return None


if __name__ == "__main__":
    # In the server's process: the kernel ends it with the command, which cannot do so where it is killed (Linux).
    if die_with(int(sys.argv[1])):
        sys.exit(main(sys.argv[2:]))
