"""Commands that ask a running server how it is, or tell it what to do: status, models, reload, drain.

Start with ``control.py``: how a server is found, by its control socket on this machine or by its URL, and how it is
asked. Each command has a file of its own, which knows one part of the admin API and how its answer is shown.
"""
