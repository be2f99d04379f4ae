"""Receives requests and writes answers: the code that all dialects share, and one folder for each dialect.

Knows HTTP's methods and headers, status codes, keys, quotas, caching and how answers are written. Does not know
replicas, workers, tensors or torch. A new dialect is a folder and its rows in ``routes.py``.
Read first: ``server.py``, then ``routes.py`` and one dialect's folder.
"""
