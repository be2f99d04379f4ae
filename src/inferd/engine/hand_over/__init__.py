"""KV blocks of prompts that one worker computes and another one uses.

``frames.py`` has what the two say to each other and the checksum of a frame. ``outgoing.py`` is a hand-over as its
sender sees it, ``incoming.py`` the receiver's books, and ``receiver.py`` the socket in front of them. Received blocks
enter the prefix cache and nothing else, so a hand-over that fails costs time and never changes an answer.
"""
