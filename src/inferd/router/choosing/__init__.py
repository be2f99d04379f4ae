"""Which replica gets a request: placement, health and affinity.

Knows loads, latencies and prefixes of prompts. Does not know processes or connections.
Read first: ``placement.py``.
"""
