"""The formats of texts that masks enforce, each as a pattern. Every other ``format`` is an annotation.

A pattern is at most as wide as the format's definition, so that an independent validator agrees with every text.
"""

from __future__ import annotations

import jsonschema_rs

_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_ZONE = r"(?:[zZ]|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?{_ZONE}"
_CLOCK = r"(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_CALENDAR = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_LABEL = r"[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,20}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,4}}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_WORD = r"[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        rf"(?:{_WORD}:){{7}}{_WORD}",
        *(
            rf"(?:{_WORD}(?::{_WORD}){{0,{before - 1}}})?::(?:{_WORD}(?::{_WORD}){{0,{6 - before}}})?"
            if before < 7
            else rf"(?:{_WORD}(?::{_WORD}){{0,6}})::"
            for before in range(1, 8)
        ),
    ]
)
_URI_CHARACTER = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"
_REGISTERED = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|%[0-9a-fA-F]{2})*"
_PORT = r"(?::(?:[1-9][0-9]{0,3}|[1-5][0-9]{4})?)?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]{1,20}"

PATTERNS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[tT]{_TIME}",
    "duration": rf"P(?:{_CALENDAR}(?:T{_CLOCK})?|T{_CLOCK}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{0,3}}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": (
        rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?://(?:(?:{_REGISTERED}(?::{_REGISTERED})?@)?{_REGISTERED}|\[::1\]){_PORT}"
        rf"(?:/{_URI_CHARACTER}*)*|/?(?:{_URI_CHARACTER}+(?:/{_URI_CHARACTER}*)*)?)"
        rf"(?:\?(?:{_URI_CHARACTER}|[/?])*)?(?:#(?:{_URI_CHARACTER}|[/?])*)?"
    ),
}


def is_enforced(name: object) -> bool:
    return name in PATTERNS


def pattern(name: str) -> str:
    return f"^(?:{PATTERNS[name]})$"


def matches(name: str, text: str) -> bool:
    return jsonschema_rs.Draft202012Validator({"format": name}, validate_formats=True).is_valid(text)
