"""The messages between the server and the process that talks to Ray: closed unions, one JSON object a line."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.nodes.ray.reservations import Needs, Room

REMEDY: Final = "is nodes.ray the address that ray start --head printed (HOST:6379), and does its machine run?"
"""What to look at where the cluster is not reached."""


class Ask(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Have Ray start an actor that joins the server as the node ``name``. ``selectors``: the best first."""

    name: str
    needs: Needs
    selectors: list[dict[str, str]]
    port: int  # of the server
    host: str = ""  # of the server; empty: the address of its machine in the cluster
    token: str


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    """End the actor of a node, wherever it is."""

    name: str


ToDriver = Ask | GiveBack


class Connected(msgspec.Struct, frozen=True, tag=True):
    """The cluster is reached. ``address``: of its head."""

    address: str


class Seen(msgspec.Struct, frozen=True, tag=True):
    """What the cluster has; sent twice a second."""

    room: Room


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The actor of a node has ended, or could not be started."""

    name: str
    reason: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The cluster is not reached; the process ends."""

    reason: str


FromDriver = Connected | Seen | Ended | Failed

to_driver_decoder = msgspec.json.Decoder(ToDriver)
from_driver_decoder = msgspec.json.Decoder(FromDriver)


def line(message: ToDriver | FromDriver) -> bytes:
    """The message as one line."""
    return msgspec.json.encode(message) + b"\n"
