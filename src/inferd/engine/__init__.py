"""Generates text: takes requests in, computes them step by step in one batch, and sends tokens out.

Knows requests, sequences, the KV cache and decoder models. Does not know HTTP, replicas, other models in the server, or
file formats (``checkpoints``), kernels (``native``) and the machine (``machine``) beyond their functions.
Read first: ``engine`` (the step), then ``scheduling.scheduler``, ``runner`` and ``load``.
"""
