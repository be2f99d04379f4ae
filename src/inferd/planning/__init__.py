"""How much memory a model needs, from its files alone, before anything is loaded.

Start with ``memory.py``: one replica of each kind of model, and all models of a configuration within one budget.
``predictive.py`` reads what a predictive model's files say. Knows headers of files and the engine's arithmetic of
memory; reads no weights, imports no torch, and decides nothing about replicas.
"""
