"""The built-in operations of pipelines: each a small pure function from arrays to arrays, with typed options.

Start with ``operation.py``: the interface. ``registry.py`` lists the operations by name; the other files hold one group
of them each. An operation knows rows and axes, and nothing of requests, batches or other steps.
"""
