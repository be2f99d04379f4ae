"""Decoder models: one file per kind of decoder; a family is an entry in a table.

The tests compare each with transformers, which is never imported here. No code from a checkpoint's folder is run.
Read first: ``llama``.
"""
