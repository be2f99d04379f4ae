"""Predictive models in a worker: decode, batch, compute, encode.

Start with ``backend.py``. A request's body reaches the worker as its client wrote it. A codec (``codecs/``) decodes it
into named arrays, ``check.py`` checks them against the model's contract, ``batcher.py`` decides what is computed
together, a runtime (``runtimes/``, one file each) computes the batch, and the codec encodes each answer. Nothing here
knows HTTP's status codes, the gateway's queues or other replicas.
"""
