"""The process that talks to Ray for a server: ``python -m inferd.nodes.ray.driver ADDRESS``.

Reads one message a line from stdin and writes one a line to stdout. It is a process of its own because Ray ends a
program that loses the head of its cluster, and because Ray ends every actor of a program that has ended: when the
server is gone, stdin ends, this process ends, and so does all that it asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
from typing import Any, Final

import msgspec

from inferd.nodes.ray.actor import NodeActor
from inferd.nodes.ray.messages import (
    REMEDY,
    Ask,
    Connected,
    Ended,
    Failed,
    FromDriver,
    GiveBack,
    Seen,
    line,
    to_driver_decoder,
)
from inferd.nodes.ray.reservations import Machine, Room

LOOK_S: Final = 0.5
PROBE_S: Final = 5.0
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_RESOURCES: Final = ("CPU", "GPU", "memory")


class Driver:
    """The actors that were asked for. ``ray``: the module. ``arguments`` of each actor, after the first one."""

    def __init__(self, ray: Any, out: int, arguments: tuple[object, ...] = ()) -> None:
        self._ray = ray
        self._out = out
        self._arguments = arguments
        self._actors: dict[str, Any] = {}

    async def run(self, address: str) -> int:
        """Do what stdin says until it ends; the exit code."""
        ray = self._ray
        if problem := await self._problem_of(address):
            self._send(Failed(problem))
            return 1
        try:
            context = await asyncio.to_thread(
                functools.partial(ray.init, address=address, log_to_driver=False, configure_logging=False)
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            self._send(Failed(_first_line(error)))
            return 1
        self._send(Connected(str(context.address_info["gcs_address"])))
        async with asyncio.TaskGroup() as group:  # a defect of one task ends the process, which is started again
            tasks = {group.create_task(self._look())}
            async for data in await _stdin():
                match to_driver_decoder.decode(data):
                    case Ask() as ask:
                        tasks.add(task := group.create_task(self._reserve(ask)))
                        task.add_done_callback(tasks.discard)
                    case GiveBack(name):
                        actor = self._actors.pop(name, None)
                        if actor is not None:
                            ray.kill(actor)
            for task in list(tasks):
                task.cancel()
        ray.shutdown()
        return 0

    async def _problem_of(self, address: str) -> str:
        """Why the head of a cluster cannot be reached, without a full stop; empty: its port is open, or Ray finds it.

        Ray would retry for many minutes and say why to its own log alone.
        """
        host, colon, port = address.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535:
            return ""  # a word of Ray's, or no address, which Ray refuses
        host = host.removeprefix("[").removesuffix("]")
        if host in _LOOPBACK:  # as Ray does
            host = self._ray.util.get_node_ip_address()
        try:
            async with asyncio.timeout(PROBE_S):
                _, writer = await asyncio.open_connection(host, int(port))
        except TimeoutError:
            return f"no connection to {host}:{port} within {PROBE_S:g} s; {REMEDY}"
        except OSError as error:
            number = error.errno or 0  # negative: of the resolver, not of the system
            said = os.strerror(number) if number > 0 else error.strerror or str(error)
            return f"no connection to {host}:{port} ({said}); {REMEDY}"
        writer.close()
        return ""

    async def _reserve(self, ask: Ask) -> None:
        """Have an actor, and stay with it to its end."""
        if not ask.host:
            ask = msgspec.structs.replace(ask, host=self._ray.util.get_node_ip_address())
        first, *others = ask.selectors
        actor = (
            self._ray.remote(NodeActor)
            .options(
                num_cpus=ask.needs.cores,
                num_gpus=ask.needs.gpus,
                memory=ask.needs.memory_bytes or None,
                label_selector=first or None,
                scheduling_strategy="SPREAD",  # of those that fit a selector: several may be asked for at once
                fallback_strategy=[{"label_selector": selector} for selector in others] or None,
                name=None,
                max_restarts=0,
            )
            .remote()
        )
        self._actors[ask.name] = actor
        try:
            reason = str(await actor.serve.remote(ask, *self._arguments))
        except self._ray.exceptions.RayError as error:
            reason = _first_line(error)
        if self._actors.pop(ask.name, None) is not None:
            self._ray.kill(actor)
        self._send(Ended(ask.name, reason))

    async def _look(self) -> None:
        """Tell what the cluster has."""
        while True:
            room = await asyncio.to_thread(self._room)
            if room is not None:
                self._send(Seen(room))
            await asyncio.sleep(LOOK_S)

    def _room(self) -> Room | None:
        """The cluster as it is; None: its head does not answer, and what was told last stands."""
        try:
            nodes, free = self._ray.nodes(), self._ray.available_resources()
            # Ray's public functions do not tell it: ``nodes`` has no state, and the list of states needs a dashboard.
            draining = self._ray._private.state.state.get_draining_nodes()
        except self._ray.exceptions.RayError:
            return None
        alive = {str(node["NodeID"]): node for node in nodes if node["Alive"]}
        machines = [
            Machine(resources=_known(node["Resources"]), labels=dict(node["Labels"]))
            for identity, node in alive.items()
            if identity not in draining
        ]
        return Room(nodes=machines, free=_known(free), draining=frozenset(alive.keys() & draining.keys()))

    def _send(self, message: FromDriver) -> None:
        with contextlib.suppress(BrokenPipeError):  # the server is gone, so stdin ends too
            os.write(self._out, line(message))


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=16 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _known(resources: dict[str, float]) -> dict[str, float]:
    return {name: float(resources[name]) for name in _RESOURCES if name in resources}


def _first_line(error: Exception) -> str:
    """What an error of Ray says: its last line where it is that of a program, as the first ones are a trace."""
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    if not lines:
        return type(error).__name__
    return (lines[-1] if "ray::" in lines[0] or "Traceback" in lines[0] else lines[0]).rstrip(".")


def main(arguments: tuple[object, ...] = ()) -> int:
    """Run until stdin ends; the exit code."""
    # Ray and what it loads may print: what they print goes to stderr, and messages alone to stdout.
    out = os.dup(1)
    os.dup2(2, 1)
    import ray

    return asyncio.run(Driver(ray, out, arguments).run(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
