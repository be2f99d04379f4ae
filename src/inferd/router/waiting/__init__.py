"""What waits: the queue, its order and its bounds.

Knows classes, tenants' shares and time as an argument. Does not know replicas' processes.
Read first: ``queue.py``.
"""
