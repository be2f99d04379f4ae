"""A model's replicas, which are local workers and remote servers, and the loading of models into memory.

Knows the requests in flight in each replica and the memory that models take. Does not know the queue.
Read first: ``replica.py``, then ``fleet.py``.
"""
