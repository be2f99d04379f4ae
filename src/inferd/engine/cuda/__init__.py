"""The same engine on CUDA: kernels in Triton, graphs for decoding, memory. Nothing here is imported before a model is on a GPU."""
