"""Where the replicas of one model find one another for hand-overs, and which role each of them has."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from inferd.config import ModelConfig
from inferd.types import Link, Role


class Links:
    """Addresses in a folder of the server's user alone, which is made with the first of them."""

    def __init__(self) -> None:
        self.folder: Path | None = None  # None: there is no address
        self._key = secrets.token_bytes(32)
        self._numbers = itertools.count()

    def add(self, role: Role) -> Link:
        """The link of a new replica. Its workers keep it over restarts."""
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="inferd-links-"))
        return Link(role=role, address=str(self.folder / f"{next(self._numbers)}.sock"), key=self._key)

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        folder, self.folder = self.folder, None
        if folder is not None:
            with contextlib.suppress(OSError):  # a worker that ends may still remove its socket
                shutil.rmtree(folder)


def wanted_roles(config: ModelConfig) -> Counter[Role]:
    """How many local replicas of each role a model has."""
    roles = config.roles
    if roles is None:
        return Counter({"both": config.num_local})
    return Counter({"prefill": roles.prefill, "decode": roles.decode})


def missing_role(config: ModelConfig, present: Iterable[Role]) -> Role:
    """The role of the next replica beside those that are present: decode before prefill, as it can do both."""
    missing = wanted_roles(config) - Counter(present)
    if config.roles is None:
        return "both"
    return "decode" if missing["decode"] or not missing["prefill"] else "prefill"
