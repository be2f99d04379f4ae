"""The dialect of OpenAI's Responses API.

Knows its items, events and errors. Does not know replicas, and parses no text of a model. Read ``create.py`` first,
then ``items.py``, ``output.py`` and ``events.py``.
"""
