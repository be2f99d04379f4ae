"""Chromium and a real server for the console's tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from tests.ports import free_port

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
WAIT_MS = 60_000
"""How long a test waits for what must come: the machine may be busy."""


def expect(locator: Any) -> Any:
    """Assertions of playwright, which wait until they hold."""
    from playwright.sync_api import expect as expected

    return expected(locator)


class Demo:
    """A server of the bundled models, with keys."""

    def __init__(self, data: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        self.env = {**os.environ, "INFERD_STATE__DATA_DIR": str(data), "PYTHONPATH": os.pathsep.join(sys.path)}
        self.admin = self.made("ops", "infer,models,metrics,admin")
        self.viewer = self.made("watchers", "metrics,models")
        self.log = (data / "log.txt").open("w")
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "inferd", "serve", "demo", "--port", str(self.port)],
            env=self.env,
            stdout=self.log,
            stderr=self.log,
        )

    def restart(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.start()
        self.await_ready()

    def key(self, tenant: str, scopes: str) -> str:
        """A key that the running server knows: it reads what others write into its database every second."""
        key = self.made(tenant, scopes)
        deadline = time.monotonic() + WAIT_MS / 1000
        while self.call("GET", "v1/models", key=key).status_code == 401:
            assert time.monotonic() < deadline, "the server does not learn of the key"
            time.sleep(0.1)
        return key

    def made(self, tenant: str, scopes: str) -> str:
        command = [sys.executable, "-m", "inferd", "keys", "create", "--tenant", tenant, "--scopes", scopes]
        return subprocess.run(command, env=self.env, check=True, capture_output=True, text=True).stdout.strip()

    def await_ready(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if httpx.get(self.url + "health/ready", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self.process.poll() is None, "the server ended"
            time.sleep(0.3)
        raise AssertionError("the server was not ready in time")

    def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {key or self.admin}"}
        return httpx.request(method, self.url + path, json=body, headers=headers, timeout=60)

    def post(self, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


class Tab:
    """A page of the browser, and everything that went wrong in it."""

    def __init__(self, browser: Any, server: Demo, base: str | None = None, **options: Any) -> None:
        self.base = base or server.url
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.foreign: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        self.page.on("request", self._asked)

    def _said(self, message: Any) -> None:
        # Chromium itself writes a line for each answer with status 400 and above: those are answers, no defects.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(f"{message.type}: {message.text}")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.base, "blob:", "data:")):
            self.foreign.append(request.url)

    def open(self, path: str) -> Any:
        self.page.goto(self.base + path)
        return self.page

    def sign_in(self, key: str) -> Any:
        page = self.open("console/#/sign-in")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("button", name="Sign out").wait_for()
        return page

    def evaluate(self, expression: str) -> Any:
        """Evaluate as the developer tools do: the page's policy allows no other way."""
        session = self.context.new_cdp_session(self.page)
        answer = session.send(
            "Runtime.evaluate", {"expression": expression, "awaitPromise": True, "returnByValue": True}
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")
