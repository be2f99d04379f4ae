"""Reads checkpoints: configuration, tokenizer, chat template and weights of a model's folder.

Knows file formats and what their fields mean. Does not know how a model is computed, scheduled or served, and runs no
code from a folder. A missing, wrong or truncated file is a ``ModelLoadError`` that names it.
Read first: ``decoder_config`` (what config.json says), then ``weights`` (tensors by name).
"""
