"""The endpoints for operators and probes: the admin API, health, the OpenAPI document and the pages for a browser.

Knows which parts of the server's state a key may see. Does not know how a change is carried out, which ``inferd.app``
does.
Read first: ``endpoints.py``.
"""
