"""Where models come from, and what their files are, before anything is loaded.

Start with ``source.py`` (from a setting to a file or folder) and ``artifact.py`` (which runtime computes it).
``signature.py`` reads inputs and outputs from a file's header, ``identity.py`` notices replaced files, ``triton.py``
reads Triton's model repositories, and ``rows/`` proves whether requests may be computed together. Knows files and
formats; loads no model and knows no worker.
"""
