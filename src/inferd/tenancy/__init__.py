"""API keys, tenants, quotas, usage and idempotency: every check of a client before a request costs anything.

Knows keys, limits, the usage ledger and the answers stored for Idempotency-Keys. Does not know HTTP, models or the
router. Read first: ``principal.py`` (what a key allows), then ``door.py`` (one request: key, quota, usage) and
``control.py`` (the parts of one server and its database). ``buckets.py`` and ``limiter.py`` are the quotas of one
server, and ``leases.py`` divides them among several servers.
"""
