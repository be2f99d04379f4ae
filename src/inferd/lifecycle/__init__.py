"""The life of a model's versions: their stages, the evidence for each, approvals, and a history that shows changes.

Start with ``stages.py`` (a pure function from a version and an event to the version after it), then ``registry.py``
(the rows in the database). Knows digests, contracts and actors; knows no HTTP and computes no model.
"""
