"""A node whose workers are tiny ones, as a script. Its arguments are those of ``inferd node``.

With ``BLIND`` in the environment it sees none of the server's files, as on a machine without them.
"""

from __future__ import annotations

import functools
import os
import sys

import msgspec
from tests.tiny_server import TINY_WORKER

from inferd.cli import node
from inferd.cli.main import main
from inferd.config import ModelConfig
from inferd.nodes import agent
from inferd.nodes.dialling import NodeOptions
from inferd.nodes.messages import ModelFile


def blind(config: ModelConfig) -> list[ModelFile]:
    return []


def with_tiny_workers(options: NodeOptions) -> NodeOptions:
    return msgspec.structs.replace(options, command=TINY_WORKER)


if __name__ == "__main__":
    run_node = node.run_node
    if "BLIND" in os.environ:
        setattr(agent, "model_files", blind)  # noqa: B010
    node.run_node = functools.partial(run_node, prepare=with_tiny_workers)
    sys.exit(main(["node", *sys.argv[1:]]))
