"""Two HTML pages that need no script and load nothing: the start page, and the page at /docs of a server without a
console."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cache

from inferd import __version__
from inferd.gateway.upstream import ModelStatus


def _page(title: str, body: str) -> bytes:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)}</title></head><body><main>{body}</main></body></html>"
    ).encode()


@cache
def docs_page() -> bytes:
    """The page at /docs where server.console is off: the page that tries endpoints is one of the console's files."""
    return _page(
        "inferd API",
        "<h1>inferd: HTTP API</h1>"
        '<p>The document for programs is <a href="openapi.json">openapi.json</a>. With server.console on, this page '
        "lets you try every endpoint.</p>",
    )


def start_page(models: Sequence[ModelStatus], host: str) -> bytes:
    """The page of the served models and their states, with a command to try one. ``host``: how the client calls this
    server."""
    rows = "".join(
        f"<tr><td><code>{html.escape(m.name)}</code></td><td>{html.escape(m.state)}</td><td>{m.replicas_ready} of "
        f"{m.replicas}</td></tr>"
        for m in models
    )
    name = html.escape(models[0].name) if models else "MODEL"
    return _page(
        "inferd",
        f"<h1>inferd {html.escape(__version__)}</h1>"
        "<table><thead><tr><th>model</th><th>state</th><th>replicas ready</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
        '<p><a href="docs">API</a> &middot; <a href="openapi.json">openapi.json</a> &middot; '
        '<a href="metrics">metrics</a> &middot; '
        '<a href="health">health</a></p>'
        f'<pre>curl -s "{html.escape(host)}/v1/chat/completions" -H "content-type: application/json" \\\n'
        f'  -d \'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}\'</pre>',
    )
