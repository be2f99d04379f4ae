"""The choice of the replica for a request: placement, circuit breakers, ejection of slow replicas, and affinity.

Knows the load and the latency of replicas and the prefixes of prompts. Does not know processes or connections.
Read first: ``placement.py``.
"""
