"""The kernels as functions of tensors: C++ on the CPU, Triton on CUDA devices, and a plain torch form of each.

Knows number formats, layouts in memory and devices. Does not know checkpoints, models, requests or which sequence owns
a block of the KV cache. A function uses the fastest kernel that accepts its tensors. The plain form is the tests'
oracle and computes wherever no kernel does. Read first: ``ops``, then ``compiled``.
"""
