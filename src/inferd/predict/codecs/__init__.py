"""One file per dialect: a body becomes a ``DecodedRequest``, a ``Result`` becomes an answer's bytes."""
