"""What gateways compare: every setting that clients could notice, no setting of one machine, and no secret."""

from __future__ import annotations

import msgspec
import pytest

from inferd.app.compared_settings import OWN_SECTIONS, OWN_SETTINGS, compared_settings
from inferd.config import CacheConfig, Config, ModelConfig, NodesConfig, ServerConfig, StateConfig, TenantConfig
from inferd.config.section import Section

CHAT = ModelConfig(source="demo")


def paths(one: Config, two: Config = Config()) -> set[str]:
    mine, other = compared_settings(one), compared_settings(two)
    return {path for path in mine.keys() | other.keys() if mine.get(path) != other.get(path)}


def test_every_name_of_the_lists_is_a_setting() -> None:
    config = Config()
    for path in OWN_SETTINGS:
        section, _, field = path.partition(".")
        assert field in type(getattr(config, section)).__struct_fields__
    assert set(Config.__struct_fields__) >= OWN_SECTIONS


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(), set()),
        (Config(server=ServerConfig(port=1, host="0.0.0.0", log_file="here")), set()),
        (Config(state=StateConfig(data_dir="there"), nodes=NodesConfig(listen="0.0.0.0:1")), set()),
        (Config(server=ServerConfig(max_body_bytes=4096)), {"server.max_body_bytes"}),
        (Config(tenants={"a": TenantConfig()}), {"tenants.a"}),
        (Config(tenants={"a": TenantConfig(rpm=3)}), {"tenants.a", "tenants.a.rpm"}),
        (Config(models={"chat": CHAT}), {"models.chat", "models.chat.source"}),
    ],
)
def test_the_settings_that_differ_from_a_default_configuration(config: Config, expected: set[str]) -> None:
    assert paths(config) == expected


def test_every_section_of_no_single_machine_is_compared() -> None:
    """A new section is compared unless it is listed as one of a machine."""
    for section in msgspec.structs.fields(Config):
        value = getattr(Config(), section.name)
        if not isinstance(value, Section) or section.name in OWN_SECTIONS:
            continue
        field = next(
            each
            for each in msgspec.structs.fields(value)
            if isinstance(each.default, bool | int | float) and f"{section.name}.{each.name}" not in OWN_SETTINGS
        )
        assert not isinstance(field.default, msgspec.UnsetType)
        changed = msgspec.structs.replace(value, **{field.name: not field.default})
        config = msgspec.structs.replace(Config(), **{section.name: changed})
        assert paths(config) == {f"{section.name}.{field.name}"}


def test_the_order_of_a_file_makes_no_difference() -> None:
    one = Config(models={"a": CHAT, "b": CHAT})
    assert paths(one, Config(models={"b": CHAT, "a": CHAT})) == set()


def test_a_password_of_a_url_is_in_no_digest_and_another_store_is_told() -> None:
    def cache(url: str) -> Config:
        return Config(cache=CacheConfig(url=url))

    here = cache("redis://user:one@cache:6379/0")
    assert paths(here, cache("redis://user:two@cache:6379/0?password=x")) == set()
    assert paths(here, cache("redis://user:one@other:6379/0")) == {"cache.url"}
