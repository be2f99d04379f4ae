"""The resources that this process may use: memory, processor cores, and the limits of its control groups.

Knows files of the operating system (``/proc``, ``/sys/fs/cgroup``), pages and numbers. Knows no tensor, no model and no
configuration, and imports no torch. Every room that loads or plans a model uses it.
Read first: ``memory``.
"""
