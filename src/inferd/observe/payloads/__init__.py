"""Prompts and answers on the disk, for the tenants that the configuration names; off unless it names some.

Start with ``log.py``: what is recorded of which calls. ``capture.py`` holds the bytes of one call, ``content.py`` makes
its record, ``redaction.py`` replaces what must not be kept, and ``store.py`` has the files, their ends and their size.
"""
