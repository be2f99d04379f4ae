"""The console's part of the gateway: its files, its sign-in, and the stream of live numbers.

Knows HTTP and sessions. Does not know what the pages do with the numbers, which is in ``inferd/console``, or where the
numbers come from, which is in ``observe/live``.
Read first: ``endpoints.py``.
"""
