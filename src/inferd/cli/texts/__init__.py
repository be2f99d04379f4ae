"""The commands that measure a text by a model's files: ``inferd perplexity``, ``inferd watermark``."""
