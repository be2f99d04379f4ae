"""Where set-up takes torch from. Prints the arguments for pip on stdout, and the reason with the size on stderr.

PyPI's build of torch for Linux is the one for NVIDIA GPUs: with its libraries some 3 GB. A machine without such a
device takes PyTorch's own build for the CPU, where its index answers at once and has the pinned version for this
interpreter. In every other case pip looks where it is configured to look. Usage: torch_index.py CONSTRAINTS

TORCH_CPU_INDEX names another index (a mirror of PyTorch's).
"""

from __future__ import annotations

import glob
import os
import platform
import re
import shutil
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PATIENCE_S = 2.0
"""For everything: the name's resolution, the page, and the size of the file."""

_SOCKET_S = 2 * PATIENCE_S  # never the first to end the wait, whose reason would be another one then

MAX_PAGE_BYTES = 16 * 1024 * 1024


class _Found:
    """What the index has: the wheel's address and its size in bytes, or why it is not used."""

    def __init__(self) -> None:
        self.url = ""
        self.num_bytes = 0
        self.why_not = f"did not answer within {PATIENCE_S:g} s"


def main() -> int:
    if not sys.platform.startswith("linux"):
        return 0  # every build for other systems is one for the CPU
    if glob.glob("/dev/nvidia*") or shutil.which("nvidia-smi") is not None:
        _say("An NVIDIA device is here: torch with CUDA, from where pip is configured to look (TORCH_ARGS changes it).")
        return 0
    index = os.environ.get("TORCH_CPU_INDEX") or CPU_INDEX
    found = _Found()
    # A thread, as neither the resolution of a name nor a slow page ends at a socket's timeout.
    asking = threading.Thread(target=_ask, args=(index, _pinned(sys.argv[1]), found), daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    if found.url:
        size = f", {found.num_bytes / 1e6:,.0f} MB" if found.num_bytes else ""
        _say(f"No NVIDIA device: torch for the CPU, from {index}{size}.")
        print(f"--index-url {index}")
    else:
        _say(f"No NVIDIA device, but {index} {found.why_not}: torch from where pip is configured to look.")
        _say("On Linux that may be the build for NVIDIA GPUs, some 3 GB with its libraries (TORCH_ARGS changes it).")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the thread may still wait


def _say(sentence: str) -> None:
    print(f"  {sentence}", file=sys.stderr)


def _pinned(constraints: str) -> str:
    """The version of torch that the constraints ask for; "" for any."""
    with open(constraints, encoding="utf-8") as lines:
        pins = [line.split("==")[1].strip() for line in lines if line.startswith("torch==")]
    return pins[0] if pins else ""


def _ask(index: str, version: str, found: _Found) -> None:
    page_url = f"{index.rstrip('/')}/torch/"
    try:
        with urllib.request.urlopen(page_url, timeout=_SOCKET_S) as answer:
            page = answer.read(MAX_PAGE_BYTES).decode("utf-8", "replace")
        tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
        name = re.escape(version) if version else r"[\d.]+"
        wheel = rf"torch-{name}(?:(?:%2B|\+)cpu)?-{tag}-{tag}-[\w.]*{platform.machine()}\.whl"
        href = re.search(rf'href="([^"#]*{wheel})', page, re.IGNORECASE)
        if href is None:
            found.why_not = f"has no torch {version} for this Python and machine"
            return
        url = urllib.parse.urljoin(page_url, href[1])
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_SOCKET_S) as answer:
                found.num_bytes = int(answer.headers.get("content-length") or 0)
        finally:
            found.url = url
    except urllib.error.HTTPError as error:
        found.why_not = f"answered with status {error.code}"
    except (OSError, ValueError) as error:
        found.why_not = f"does not answer ({getattr(error, 'reason', None) or error})"


if __name__ == "__main__":
    sys.exit(main())
