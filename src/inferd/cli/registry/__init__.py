"""``inferd registry``: versions of models and their stages, and the artefacts that they consist of."""
