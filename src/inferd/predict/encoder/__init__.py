"""Text encoders: bidirectional transformers, and decoders that embed, with their heads.

Start with ``load.py``. ``checkpoint.py``, ``config.py`` and ``sentence.py`` read folders of Hugging Face and of
sentence-transformers, ``texts.py`` makes token ids, ``ragged.py`` flattens them, and ``bert.py``, ``modernbert.py`` and
``decoder.py`` are the families. Each family is checked against transformers in the tests. No code of a folder is run.
"""
