"""Kernels in Triton's language, with nothing around them: what launches them, with types and checks, lies one folder up.

They take pointers and numbers and know no tensor. With ``TRITON_INTERPRET=1`` set before the import they run on the CPU.
"""
