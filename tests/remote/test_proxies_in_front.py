"""The proxies of the documentation, in front of a gateway: answers arrive, and streams as they are made."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.ports import free_port
from tests.remote.fault_server import CHUNKED, DONE, Talk, completion, event, piece
from tests.remote.test_relays import MESSAGES, Client, Site, through

PAGE = Path(__file__).resolve().parents[2] / "docs" / "remote-servers.md"


def snippet(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@contextlib.asynccontextmanager
async def proxy(name: str, folder: Path, server_port: int) -> AsyncIterator[int]:
    port = free_port()
    text = snippet(name).replace("127.0.0.1:8000", f"127.0.0.1:{server_port}")
    if name == "nginx":
        paths = "".join(f"{kind}_temp_path {folder};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        text = text.replace("listen 8080", f"listen 127.0.0.1:{port}")
        text = (
            f"daemon off; error_log /dev/null; pid {folder}/pid; events {{}}\nhttp {{ access_log off; {paths}\n{text}}}"
        )
        words = ["nginx", "-p", str(folder), "-c", str(folder / "conf")]
    else:
        text = text.replace("bind :8080", f"bind 127.0.0.1:{port}")
        words = ["haproxy", "-db", "-f", str(folder / "conf")]
    (folder / "conf").write_text(text)
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.DEVNULL, stderr=None)
    try:
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                assert process.returncode is None, f"{name} ended with {process.returncode}"
                await asyncio.sleep(0.02)
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
def test_a_documented_proxy_passes_answers_on_and_streams_as_they_are_made(name: str, tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    heard = asyncio.Event()

    async def script(talk: Talk) -> None:
        if b'"stream":true' not in talk.body:
            await talk.answer(completion("hello"))
            return
        await talk.send(CHUNKED)
        await talk.event(piece("one"))
        await asyncio.wait_for(heard.wait(), 10)  # the client has it, before there is more
        await talk.chunk(DONE)
        await talk.end()

    async def then(site: Site) -> None:
        async with proxy(name, tmp_path, site.server.port) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            client = Client(reader, writer)
            for _ in range(2):
                assert (await client.ask({"model": "m", "messages": MESSAGES})).body == completion("hello")
            client.send({"model": "m", "messages": MESSAGES, "stream": True})
            await asyncio.wait_for(reader.readuntil(event(piece("one"))), 10)
            heard.set()
            await asyncio.wait_for(reader.readuntil(DONE), 10)
            writer.close()

    through(script, then)
