"""The OpenAI API with vLLM's fields, and the APIs about texts (embeddings, rerank, tokenize).

Knows the fields of each body (``wire``) and how an answer is written. Does not know keys, queues or replicas.
Read first: ``chat.py``.
"""
