"""The log as text for a terminal: the same entries, short and readable.

Knows the JSON lines of ``logs``. Successful probes and scrapes are left out, and nothing else is.
"""

from __future__ import annotations

import json
import sys

from inferd.events import state_words
from inferd.types import JSON
from inferd.worker.log_lines import neutral

_HEAD = ("ts", "level", "event")
_PROBES = ("/health", "/livez", "/readyz", "/ping", "/metrics", "/admin/status")


def is_plain(log_format: str) -> bool:
    """Whether messages on stderr are text, as on a terminal, or JSON lines."""
    return log_format == "text" or (log_format == "auto" and sys.stderr.isatty())


def plain(line: str) -> str | None:
    """A JSON line as text; None for a successful probe or scrape. Texts of clients and models stay harmless for a
    terminal."""
    entry: JSON = json.loads(line)
    at = entry["ts"][11:19]
    match entry["event"]:
        case "http":
            return _http(at, entry)
        case "replica":
            reason = f": {neutral(entry['reason'])}" if entry["reason"] else ""
            return f"{at} {neutral(entry['model'])}/{entry['replica']} {state_words(entry['state'])}{reason}"
        case "log":
            places = "".join(
                f"\n    {neutral(place)}" for place in (*entry.get("trace", "").splitlines(), *entry.get("places", ()))
            )
            return f"{at} {entry['level']}: {neutral(entry['message'])}{places}"
        case "rollout":
            paused = ", paused" if entry["paused"] else ""
            return (
                f"{at} rollout of {neutral(entry['model'])} from version {entry['stable']} to {entry['new']}: "
                f"{entry['state'].replace('_', ' ')}{paused}, {100 * entry['share']:g} %: {neutral(entry['reason'])}"
            )
        case "drift":
            what = f"drifts: {neutral(entry['sentence'])}" if entry["drifting"] else "is like its reference again"
            return f"{at} {neutral(entry['model'])}: {entry['stream']} {what}"
        case "scale":
            return (
                f"{at} {neutral(entry['model'])} has {entry['replicas']} replicas and is to have {entry['desired']}: "
                f"{neutral(entry['rule'])}: {neutral(entry['reason'])}"
            )
        case "lines_dropped":
            return f"{at} {entry['level']}: {entry['lines']} lines of the log were dropped here"
        case "refused" | "breaker" | "retry" | "unload" | "audit" as event:
            fields = {name: value for name, value in entry.items() if name not in _HEAD and value != ""}
            return f"{at} {event}: " + ", ".join(f"{name} {neutral(str(value))}" for name, value in fields.items())
        case _:
            return f"{at} {line}"


def _http(at: str, entry: JSON) -> str | None:
    if entry["route"].startswith(_PROBES) and entry["status"] in (200, 503):
        return None
    where = neutral(entry.get("path") or entry["route"])
    said = f"{at} {neutral(entry['method'])} {where} {entry['status']} in {entry['duration_s']:.3f} s"
    if entry["model"] is not None:
        said += f"  {neutral(entry['model'])}"
    usage = entry.get("usage")
    if usage and (usage["prompt_tokens"] or usage["completion_tokens"]):  # a prediction has none
        cached = f" ({usage['cached_tokens']} cached)" if usage["cached_tokens"] else ""
        said += f"  {usage['prompt_tokens']}{cached} + {usage['completion_tokens']} tokens"
    first = entry.get("timings", {}).get("first_token")
    if first is not None:
        said += f"  first after {first:.3f} s"
    speed = entry.get("speed", {})
    if "tokens_s" in speed:
        said += f"  {speed['tokens_s']:.1f} tokens/s"
    if "tpot_s" in speed:
        said += f"  {speed['tpot_s'] * 1000:.1f} ms per token"
    if entry["error_code"] is not None:
        said += f"  {neutral(entry['error_code'])}"
    if "error" in entry:
        said += f": {neutral(entry['error'])}"
    return said
