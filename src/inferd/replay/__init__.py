"""Questions to a running server whose answers are known: what an earlier version answered, or what a person expects.

Works over HTTP, as any client. Start with ``replay.py``: recorded requests are asked again, and the answers are
compared. ``evaluate.py`` runs golden sets. ``answers.py`` reads answers of every dialect, ``difference.py`` compares two
of them, ``statistics.py`` has the tests and bounds, ``report.py`` the results, and ``page.py`` their page. Knows nothing
of the gateway but its public API.
"""
