"""Rolling windows over a WebSocket: each window of a client's samples is one prediction.

Knows bytes of samples and how windows are cut (``cutting``). Does not know HTTP's framing or what a model computes.
Read first: ``endpoint.py``, then ``stream.py``.
"""
