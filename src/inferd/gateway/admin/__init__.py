"""What operators and probes ask: the admin API, health, the OpenAPI document and the pages for a browser.

Knows which key may see what. Does not know how a change is carried out, which is the composition root's (``app``).
Read first: ``endpoints.py``.
"""
