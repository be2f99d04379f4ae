"""The log as text for a terminal: the same entries, short and readable.

Knows the JSON lines of ``logs``. Successful probes and scrapes are left out, and nothing else is.
"""

from __future__ import annotations

import json
import sys

from inferd.events import state_words
from inferd.types import JSON

_PROBES = ("/health", "/livez", "/readyz", "/ping", "/metrics", "/admin/status")


def is_plain(log_format: str) -> bool:
    """Whether the log on stderr is text, as on a terminal, or JSON lines."""
    return log_format == "text" or (log_format == "auto" and sys.stderr.isatty())


def plain(line: str) -> str | None:
    """A JSON line as text; None for a successful probe or scrape."""
    entry: JSON = json.loads(line)
    at = entry["ts"][11:19]
    match entry["event"]:
        case "http":
            return _http(at, entry)
        case "replica":
            reason = f": {entry['reason']}" if entry["reason"] else ""
            return f"{at} {entry['model']}/{entry['replica']} {state_words(entry['state'])}{reason}"
        case "log":
            places = "".join(
                f"\n    {place}" for place in (*entry.get("trace", "").splitlines(), *entry.get("places", ()))
            )
            return f"{at} {entry['level']}: {entry['message']}{places}"
        case _:
            return f"{at} {line}"


def _http(at: str, entry: JSON) -> str | None:
    if entry["route"].startswith(_PROBES) and entry["status"] in (200, 503):
        return None
    where = entry.get("path") or entry["route"]
    said = f"{at} {entry['method']} {where} {entry['status']} in {entry['duration_s']:.3f} s"
    if entry["model"] is not None:
        said += f"  {entry['model']}"
    usage = entry.get("usage")
    if usage and (usage["prompt_tokens"] or usage["completion_tokens"]):  # a prediction has none
        cached = f" ({usage['cached_tokens']} cached)" if usage["cached_tokens"] else ""
        said += f"  {usage['prompt_tokens']}{cached} + {usage['completion_tokens']} tokens"
    first = entry.get("timings", {}).get("first_token")
    if first is not None:
        said += f"  first after {first:.3f} s"
    if entry["error_code"] is not None:
        said += f"  {entry['error_code']}"
    if "error" in entry:
        said += f": {entry['error']}"
    return said
