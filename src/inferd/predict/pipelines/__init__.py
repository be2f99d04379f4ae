"""Several steps as one model: operations and models, wired by references to tensors and run in one worker.

Start with ``wiring.py``: how steps, tensors and shapes hang together. ``build.py`` makes a pipeline of it, and
``execution.py`` runs one. The operations are in ``inferd.predict.steps``, and the models are loaded by
``inferd.predict.runtimes.pipeline``. Nothing here knows files, dialects or batching across requests' queues.
"""
