"""What the machine leaves this process: memory, processor cores, and the limits of its control groups.

Knows files of the operating system (``/proc``, ``/sys/fs/cgroup``) and numbers. Knows no tensor, no model and no
configuration; nothing here imports torch. Used by every room that loads a model or plans one.
Read first: ``memory``.
"""
