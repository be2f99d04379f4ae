"""Kernels of rows in Triton, for CUDA devices: ``kernels`` has the programs, the modules beside it launch them.

``switch`` says whether Triton computes. Triton itself is imported at the first launch.
"""
