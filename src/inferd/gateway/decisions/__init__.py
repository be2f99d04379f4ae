"""The dialect of OpenAI's Decisions API: questions about an input, answered with probabilities.

Knows its fields and the wording of its questions. Does not know replicas or tokens. Read ``create.py`` first, then
``questions.py``.
"""
