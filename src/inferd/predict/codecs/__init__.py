"""One file per dialect: a body becomes a ``Question``, a ``Result`` becomes an answer's bytes."""
