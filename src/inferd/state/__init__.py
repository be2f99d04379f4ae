"""Persistent state: one database schema for SQLite and PostgreSQL, and the thread that uses it.

Knows connections, transactions, migrations, and which servers use the same database. Does not know what the tables
mean: ``tenancy/`` writes and reads them. The event loop never touches a database; it sends jobs to ``thread.py``.
Read first: ``database.py`` (the interface of a database), then ``schema.py`` (the tables) and ``thread.py``.
"""
