"""What the console's endpoints share between requests."""

from __future__ import annotations

from inferd.config import Config
from inferd.gateway.console.assets import Assets
from inferd.gateway.console.live_stream import LiveStream
from inferd.gateway.console.sessions import Sessions
from inferd.observe.live.live import Live


class Console:
    """The files, the sessions and the viewers of one server. ``config``: the configuration of now."""

    def __init__(self, config: Config, live: Live | None = None, assets: Assets | None = None) -> None:
        """Without ``live`` there are no numbers to see, as in a gateway for tests."""
        self.config = config
        self.assets = assets if assets is not None else Assets()
        self.sessions = Sessions()
        self.stream = LiveStream(live) if live is not None else None

    def close(self) -> None:
        """End the streams, because the server stops."""
        if self.stream is not None:
            self.stream.close()
