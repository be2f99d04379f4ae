"""Constraints on answers: a schema, an expression or a grammar becomes masks of tokens, and a finished answer is checked.

Knows schemas, grammars and the tokens of a vocabulary. Does not know sequences, logits or the scheduler (``engine``),
or the notation of a checkpoint's calls (``checkpoints.answers``).
"""
