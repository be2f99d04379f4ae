"""Triton kernels for CUDA devices: the folder ``kernels`` has the programs, the modules beside it launch them.

Knows shapes, tiles and launches. Does not know models or requests. ``switch`` says whether Triton computes; Triton
itself is imported at the first launch. Read first: ``switch``, then ``attention``.
"""
