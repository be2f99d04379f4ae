"""Text of a checkpoint: its tokenizer, the way back from tokens to text, and its chat template.

Knows tokenizer.json, tokenizer_config.json and chat templates. Knows no requests and no tensors.
Read first: ``tokenizer``.
"""
