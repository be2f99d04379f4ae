"""Addresses of remote servers: what is taken, how it is told, and what is refused."""

from __future__ import annotations

import string

import pytest

from inferd.errors import ConfigError
from inferd.remote.origin import Origin, origin_of


@pytest.mark.parametrize(
    ("url", "origin", "authority", "told"),
    [
        ("http://a/v1", Origin("a", 80, False, "/v1"), b"a", "http://a/v1"),
        ("https://a", Origin("a", 443, True, ""), b"a", "https://a"),
        ("https://a/", Origin("a", 443, True, ""), b"a", "https://a"),
        ("http://a:443/x/y/", Origin("a", 443, False, "/x/y"), b"a:443", "http://a:443/x/y"),
        ("https://a:80", Origin("a", 80, True, ""), b"a:80", "https://a:80"),
        ("http://[::1]:8000/v1", Origin("::1", 8000, False, "/v1"), b"[::1]:8000", "http://[::1]:8000/v1"),
        ("http://[::1]", Origin("::1", 80, False, ""), b"[::1]", "http://[::1]"),
        ("https://bücher.example", Origin("bücher.example", 443, True, ""), b"xn--bcher-kva.example", None),
    ],
)
def test_an_address_has_a_host_a_port_and_a_path(url: str, origin: Origin, authority: bytes, told: str | None) -> None:
    found = origin_of(url)
    assert found == origin
    assert found.authority == authority
    assert told is None or str(found) == told


def test_every_printable_character_but_those_that_end_a_path_may_be_in_it() -> None:
    for character in string.ascii_letters + string.digits + "!\"$%&'()*+,-./:;<=>@[\\]^_`{|}~":
        assert origin_of(f"http://a/b{character}c").base_path == f"/b{character}c"


@pytest.mark.parametrize("path", ["a b", "a\x01b", "a\x1fb", "a\x0bb", "a?b", "a?b=c", "a#b", "ä"])
def test_a_path_with_something_else_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="more than a host and a path"):
        origin_of(f"http://host/{path}")


@pytest.mark.parametrize(
    "url", ["ftp://a", "a", "//a", "http://", "http:///v1", "http://a:x", "http://a:65536", "http://a..b"]
)
def test_what_names_no_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a server"):
        origin_of(url)


@pytest.mark.parametrize("secret", ["user:secret", "user", ":secret", ""])
def test_an_address_with_a_password_is_refused_and_not_repeated(secret: str) -> None:
    with pytest.raises(ConfigError, match="holds a password") as refused:
        origin_of(f"https://{secret}@host/v1")
    assert "secret" not in refused.value.message
