"""The boundary between the gateway and its worker processes: messages, frames, loops and supervision.

Start with ``messages.py``: everything that crosses the boundary. A worker is ``main.py``, which drives a backend by
``loop.py`` (generation, with threads) or ``direct.py`` (predictions, one thread); ``open_requests.py`` guarantees the
end of each request for both. The gateway's side is ``supervisor.py``, ``process.py`` and ``asynchronous.py``. Knows no
HTTP, no queue and no kind of model: backends and their callers are other rooms.
"""
