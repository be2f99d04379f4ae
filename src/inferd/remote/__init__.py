"""Clients of remote servers: a connection pool, HTTP/1.1, and OpenAI's dialect over it.

Knows how to send one request to one server and what its answer means. Does not know replicas, queues or retries
(``inferd.router``). A failure of the server becomes ``UpstreamFailed``.
Read first: ``openai.py``, then ``pool.py`` and ``connection.py``.
"""
