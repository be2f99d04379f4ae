"""RECEIVE and STREAM: what all dialects share, and one folder for each dialect.

Knows HTTP's words, status codes, keys, quotas, caching and how answers are written. Does not know replicas,
workers, tensors or torch. A new dialect is a folder and its rows in ``routes.py``.
Read first: ``server.py``, then ``routes.py`` and one dialect's folder.
"""
