"""What the process beside Ray says of a cluster: why it is not reached, and what its machines have."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from inferd.nodes.ray.driver import Driver
from inferd.nodes.ray.messages import REMEDY, Failed, from_driver_decoder
from inferd.nodes.ray.reservations import Machine, Room


class RayError(Exception):
    """The base of Ray's errors."""


def failure(address: str, error: Exception) -> str:
    """What the driver says where Ray does not reach a cluster, or gives this error."""

    def init(**_: object) -> None:
        raise error

    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    read, write = os.pipe()
    try:
        assert asyncio.run(Driver(SimpleNamespace(init=init, util=util), write).run(address)) == 1
        said = from_driver_decoder.decode(os.read(read, 65536))
    finally:
        os.close(read)
        os.close(write)
    assert isinstance(said, Failed)
    return said.reason


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("No cluster is there.\nLook at the log.", "No cluster is there"),
        ("\n  No cluster is there.  \n\n", "No cluster is there"),
        (
            "\x1b[36mray::NodeActor.serve()\x1b[39m (pid=7)\n  File a, line 1\nValueError: no model.\n",
            "ValueError: no model",
        ),
        ("Traceback (most recent call last):\n  File a\nOSError: no file", "OSError: no file"),
        ("The actor died.\nTraceback (most recent call last):\n  File a", "The actor died"),
        ("", "ConnectionError"),
        (" \n ", "ConnectionError"),
    ],
)
def test_an_error_of_ray_is_told_in_its_one_line_that_says_most(said: str, told: str) -> None:
    assert failure("auto", ConnectionError(said)) == told


def test_a_closed_port_is_told_before_ray_is_asked() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            said = failure(f"{host}:{port}", AssertionError("Ray is asked"))
            assert said == f"no connection to 127.0.0.1:{port} (Connection refused); {REMEDY}"


@pytest.mark.parametrize("address", ["auto", "host", "host:name", "host:65536", "ray://host:x"])
def test_words_and_what_is_no_port_are_left_to_ray(address: str) -> None:
    assert failure(address, ValueError("Ray's own words.")) == "Ray's own words"


def test_an_open_port_is_left_to_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert failure(f"127.0.0.1:{port}", RuntimeError("another version")) == "another version"


def node(identity: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": identity, "Alive": alive, "Resources": resources, "Labels": {"zone": identity}}


def test_the_room_of_a_cluster_is_that_of_machines_that_live_and_do_not_drain() -> None:
    nodes = [node("a", CPU=2, memory=9, disk=1), node("b", CPU=4), node("c", alive=False, CPU=8)]
    state = SimpleNamespace(get_draining_nodes=lambda: {"b": 0, "c": 0})
    ray = SimpleNamespace(
        nodes=lambda: nodes,
        available_resources=lambda: {"CPU": 3, "GPU": 1, "other": 5},
        exceptions=SimpleNamespace(RayError=RayError),
        _private=SimpleNamespace(state=SimpleNamespace(state=state)),
    )
    driver = Driver(ray, 1)
    assert driver._room() == Room(
        nodes=[Machine(resources={"CPU": 2.0, "memory": 9.0}, labels={"zone": "a"})],
        free={"CPU": 3.0, "GPU": 1.0},
        draining=frozenset({"b"}),
    )

    def silent() -> list[object]:
        raise RayError("The head is gone.")

    ray.nodes = silent
    assert driver._room() is None, "what was told last stands"
