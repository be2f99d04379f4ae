"""Predictive models in a worker: decode, batch, compute, encode.

A request's body reaches the worker as its client wrote it. A codec (``codecs/``) turns it into named arrays, the
backend checks them against the model's contract and puts them into the batcher (pure), a runtime (``runtimes/``, one
file each) computes a batch, and the codec writes each answer. Nothing here knows HTTP's status codes, queues of the
gateway or other replicas.
"""
