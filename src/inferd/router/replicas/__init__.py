"""A model's replicas: local workers and remote servers, in and out of memory.

Knows what is in flight in each, and what fits into memory. Does not know the queue.
Read first: ``replica.py``, then ``fleet.py``.
"""
