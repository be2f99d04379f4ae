"""What dialects share of files and batches: how the request of a line is asked, and how contents are sent and received.

Knows exchanges without a connection, multipart bodies, and the store of ``jobs/``. Does not know the objects of a
dialect.
"""
