"""The composition root: builds every part of a server once, wires and runs them, changes them and takes them down.

Start with ``root.py``: the order in which everything starts and stops. ``reload.py`` and ``change.py`` adopt another
configuration while the server runs, ``actions.py`` and ``control_socket.py`` are the operator's commands, and
``departure.py`` is the way out. Knows which parts exist and how they fit together, and nothing of their work.
"""
