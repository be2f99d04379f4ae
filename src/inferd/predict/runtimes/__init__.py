"""One file per kind of artifact, each behind ``inferd.predict.runtime.Runtime``, imported only when a model needs it.

Start with ``onnx.py`` as an example: ``load`` reads the file, makes the contract and tries it, and a class computes
batches. ``trial.py`` tries models at load, ``tabular.py`` and ``boosters.py`` hold what several runtimes share. A
runtime knows its library; it knows no dialect, no queue and no socket.
"""
