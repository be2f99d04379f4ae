"""The kernels as functions of tensors: C++ on the CPU, Triton on CUDA devices, and a plain torch twin of each.

Knows number formats, layouts in memory and devices. Does not know checkpoints, models, requests or the KV cache's books.
A function takes the fastest kernel that accepts its tensors; the plain form is the oracle of the tests and computes
wherever no kernel does.
Read first: ``ops``, then ``compiled``.
"""
