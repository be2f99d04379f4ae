"""The engine on CUDA devices: recorded graphs for decoding, and the device's memory.

Knows devices, streams and graphs. Does not know requests or scheduling. The kernels are in ``native.triton``. Nothing
here is imported before a model is loaded to a GPU. Read first: ``steps``.
"""
