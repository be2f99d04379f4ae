"""The durable state of the Responses API: responses, their events and items, conversations, requests in the background.

Knows tenants, ids, bytes and ages. Does not know HTTP, the fields of items, or how a response is computed. Everything is
in the state database and is used through its thread, so the event loop awaits and never blocks.
Read first: ``port.py`` (the interface of a dialect), then ``store.py``, ``responses.py`` and ``bounds.py``.
"""
