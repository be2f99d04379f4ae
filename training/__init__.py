"""Trains the bundled chat model: the corpus generator, the tokenizer, the trainer, the evaluation."""
