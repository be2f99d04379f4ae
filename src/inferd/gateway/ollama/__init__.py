"""The dialect of Ollama's API, below ``/api``.

Knows its fields, lines and errors. Does not know replicas, and parses no text of a model. Read ``chat.py`` first, then
``prompt.py`` and ``answers.py``.
"""
