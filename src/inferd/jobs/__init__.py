"""Files of clients, and batch jobs: many requests in a file, answered in a file.

Knows rows of files and batches in the state database, contents of files in a folder, lines, and the order in which a
batch goes on. Does not know HTTP, keys, models, or how a request is answered: an ``Sender`` does that. Read first:
``batch.py`` (a batch), ``machine.py`` (its states), then ``run.py`` (one batch from its first to its last line).
"""
