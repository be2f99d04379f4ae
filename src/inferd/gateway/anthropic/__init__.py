"""The dialect of Anthropic's Messages API.

Knows its fields, events and errors. Does not know replicas, and parses no text of a model. Read ``messages.py`` first,
then ``prompt.py`` and ``blocks.py``.
"""
