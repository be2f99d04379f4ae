"""The comparison of two answers to one request, for shadow copies, replays and golden sets. Pure.

Start with ``answers.py``. Knows the bodies of answers; knows no request, no version and no statistics.
"""
