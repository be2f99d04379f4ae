"""Speculative decoding: guesses of the next tokens, checked by the model in one step.

Knows sequences, guesses and what a step costs. Does not know requests, text or how the target model computes.
``prompt_lookup`` and ``draft_model`` make guesses, ``gain`` decides how many are worth checking.
Read first: ``speculation``.
"""
