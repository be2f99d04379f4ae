"""How quantised checkpoints say what they hold: GPTQ, AWQ, compressed-tensors, EETQ and fp8, read as they are.

``declared`` reads config.json, ``layout`` the files' headers (both know no tensor), ``reading`` turns what is stored into
what the products take, ``packing`` moves the bits, ``writing`` makes a checkpoint in the compressed-tensors format.
"""
