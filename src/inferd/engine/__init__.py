"""Generates text: takes requests in, computes them step by step in one batch, and returns tokens and text.

Knows requests, sequences, the KV cache and decoder models. Does not know HTTP, replicas or other models of the server.
Uses file formats (``checkpoints``), kernels (``native``) and the machine (``machine``) through their functions only.
Read first: ``engine`` (the step), then ``scheduling.scheduler``, ``runner`` and ``load``.
"""
