"""The direct path of HTTP requests with a cached head, for replicas with room: one object per request.

Heads are cached by their bytes. Requests that need more are left to the general path, or converted to it.
Read first: ``heads.py``.
"""
