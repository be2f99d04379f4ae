"""The queue of a model: its order, its bounds and its drain rate, and the availability that follows from them.

Knows priority classes and the shares of tenants. Time is an argument. Does not know the processes of replicas.
Read first: ``queue.py``.
"""
