"""The node of one reservation, as it runs in a Ray cluster: an actor whose process is a node of the server.

Ray ends the actor with the job that asked for it. Its workers end with its connection to the server, as those of any
node.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

from inferd.errors import InferdError
from inferd.machine.memory import available_bytes
from inferd.nodes.agent import Agent
from inferd.nodes.cache import cache_folder, first_unused
from inferd.nodes.dialling import NodeOptions
from inferd.nodes.ray.messages import Ask
from inferd.nodes.tokens import parse_token
from inferd.worker.process import WORKER_COMMAND

REJOIN_S: Final = 30.0
"""Seconds without the server after which the actor ends, where Ray has not ended it."""


class NodeActor:
    """Joins the server and starts the workers that it is sent, until the server lets it go."""

    async def serve(self, ask: Ask, command: tuple[str, ...] = WORKER_COMMAND) -> str:
        """Be a node; why it ended. ``command`` starts a worker."""
        import ray

        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
        context = ray.get_runtime_context()
        options = NodeOptions(
            host=ask.host,
            port=ask.port,
            token=parse_token(ask.token),
            name=ask.name,
            num_cores=ask.needs.cores,
            memory_bytes=ask.needs.memory_bytes or available_bytes(),
            num_gpus=len(ray.get_gpu_ids()),
            labels=context.get_node_labels(),
            drain_s=0.0,
            command=command,
            threads=ask.needs.cores,
            rejoin_s=REJOIN_S,
        )
        try:
            await Agent(options, first_unused(cache_folder("ray"))).run()
        except InferdError as error:
            return error.message.rstrip(".")
        return "the server let it go"
