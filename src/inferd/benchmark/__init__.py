"""Load generation and reports, for ``inferd bench``.

Start with ``load.py``: closed and open loops of clients over raw sockets. ``dataset.py`` makes the requests,
``stats.py`` the figures and ``report.py`` the HTML page; ``step_profile.py`` reads where an inferd server's steps spend
their time. Knows the OpenAI completion routes of any server, and nothing of how inferd serves them.
"""
