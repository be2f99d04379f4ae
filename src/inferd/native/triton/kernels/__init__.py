"""Programs in Triton's language. The modules one folder up launch them, with types and checks.

The programs take pointers and numbers and know no tensor. With ``TRITON_INTERPRET=1`` set before the import they run on
the CPU.
"""
