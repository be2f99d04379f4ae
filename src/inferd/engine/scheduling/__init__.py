"""Decides what each step computes: sequences, blocks of the KV cache, priorities and fairness.

Pure over its tables: no tensor, no thread, no clock; time is an argument. The sequences' tokens and the numbers of
their blocks are all that is known of a request.
Read first: ``scheduler``, then ``blocks``.
"""
