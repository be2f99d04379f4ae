"""The format of the metrics page that a client prefers (RFC 9110, 12.5.1)."""

from __future__ import annotations

from typing import Final

_OPENMETRICS: Final = "application/openmetrics-text"
_VERSIONS: Final = ("", "1.0.0")
_TEXT: Final = ("text/plain", "text/*", "*/*")


def wants_openmetrics(accept: str) -> bool:
    """Whether the header ``Accept`` ranks OpenMetrics of a version that is written here above the text format. Of equal
    ranks the text format is taken."""
    best_open = best_text = 0.0
    for part in accept.lower().split(","):
        media, *parameters = [word.strip() for word in part.split(";")]
        values = dict([_pair(parameter) for parameter in parameters])
        quality = _quality(values.get("q", "1"))
        if media == _OPENMETRICS and values.get("version", "") in _VERSIONS:
            best_open = max(best_open, quality)
        elif media in _TEXT:
            best_text = max(best_text, quality)
    return best_open > best_text


def _pair(parameter: str) -> tuple[str, str]:
    name, _, value = parameter.partition("=")
    return name.strip(), value.strip().strip('"')


def _quality(text: str) -> float:
    """0 where it is not a number between 0 and 1."""
    try:
        quality = float(text)
    except ValueError:
        return 0.0
    return quality if 0.0 <= quality <= 1.0 else 0.0
