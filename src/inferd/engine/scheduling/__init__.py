"""Decides what each step computes: sequences, blocks of the KV cache, priorities and fairness.

Knows token ids, block numbers, classes and tenants. Does not know tensors, threads, clocks or text; time is an
argument. Every module is pure over its own tables. Read first: ``scheduler``, then ``blocks``.
"""
