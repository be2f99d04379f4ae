"""The browser, the server and the signed-in page that the console's tests share.

Tests with a browser are skipped, with the reason, where playwright or Chromium is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.console.browser import CHROMIUM, FLAGS, WAIT_MS, Demo, Tab


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make setup")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium, or name it in CHROMIUM")
    playwright.expect.set_options(timeout=WAIT_MS)
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    demo = Demo(tmp_path_factory.mktemp("data"))
    try:
        demo.await_ready()
        yield demo
    finally:
        demo.close()


@pytest.fixture
def tab(browser: Any, server: Demo) -> Iterator[Tab]:
    tab = Tab(browser, server)
    yield tab
    tab.context.close()
    assert tab.complaints == []
    assert tab.foreign == []


@pytest.fixture
def page(tab: Tab, server: Demo) -> Any:
    """A page that is signed in with every scope."""
    return tab.sign_in(server.admin)
