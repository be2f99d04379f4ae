"""One file per dialect: a body becomes a ``DecodedRequest``, and a ``Result`` becomes the bytes of an answer.

Start with ``port.py``: the interface of a codec; ``registry.py`` names the codec of each dialect. ``tensors.py``,
``values.py`` and ``texts.py`` hold what several dialects share. Codecs run in the worker and know contracts and arrays;
they know no model, no batch, no socket and no status code.
"""
