"""Text encoders: bidirectional transformers (and decoders that embed) with their heads, from Hugging Face and
sentence-transformers folders. Each family is checked against transformers in the tests; nothing of a folder is run.
"""
