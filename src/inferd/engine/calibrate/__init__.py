"""Makes quantised checkpoints: chooses integers by a text, writes the folder, and measures its quality.

``rounding`` has grids, ``gptq`` the method GPTQ, ``observe`` the inputs of products, ``layers`` a model layer by layer,
``tuning`` and ``student`` learning. Does not know serving.
Read first: ``checkpoint``.
"""
