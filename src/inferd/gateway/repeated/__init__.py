"""Requests whose head was seen before, for replicas that have room: one object for each.

Knows heads by their bytes. Everything unusual is left to the ordinary path, or turned into it.
Read first: ``heads.py``.
"""
