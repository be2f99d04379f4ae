"""``inferd registry``: the artefacts of models, their digests and signatures. One file per command."""
