"""The response cache: complete answers that are sent again for equal requests.

Knows keys, sizes, ages and tenants. Does not know which requests may be cached, what an answer contains, or HTTP: the
gateway decides these. A cache that fails or is slow is a miss, never an error of a request.
Read first: ``port.py`` (the interface), then ``key.py`` (which requests are equal), ``memory.py`` and ``redis.py``.
"""
