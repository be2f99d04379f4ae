"""Formats of quantised checkpoints: GPTQ, AWQ, compressed-tensors, EETQ and fp8, which are read without conversion.

``declared`` reads config.json and ``layout`` the files' headers; both know no tensor. ``reading`` turns stored tensors
into what products use, ``packing`` unpacks bits, and ``writing`` makes a compressed-tensors checkpoint.
Read first: ``layout``.
"""
