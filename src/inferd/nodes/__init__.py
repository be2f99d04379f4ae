"""Other machines that give memory and cores to the server: its nodes.

A node joins with a token, is heard every fifth of a second, starts the workers that it is sent, and is gone when neither
it nor its kernel answers. ``listener.py`` and ``link.py`` are the server's side, ``agent.py`` is the node's. A worker on
a node is a ``NodeLife``, which a supervisor handles as it handles a process of its own machine.

Knows TLS, tokens, heartbeats and files. Does not know which model runs where, nor why: the router's machines decide it.
"""
