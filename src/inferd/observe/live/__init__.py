"""The recent past of the server's numbers, in memory of a fixed size, and its feed of events.

The console, ``inferd top`` and the alerts of the console read it; Prometheus is not needed. The store of metrics is
read once a second. Knows the names of metrics and nothing of HTTP.
Read first: ``live.py``, then ``rings.py``.
"""
