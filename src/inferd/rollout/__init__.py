"""The way of a new version of a model to all of its traffic: steps, guards, and the evidence on which they decide.

Moves the weights of versions that the configuration knows. Knows no HTTP, no replica and no tensor.
"""
