"""Whether the rows of a model's first dimension are independent: a proof over its graph.

Start with ``value.py``: the abstract value that each tensor of a graph has. The rules of the operators give the values
of a node's outputs from those of its inputs, with one group of operators in each file. ``onnx.py`` and ``exported.py``
walk the graphs of the two formats, and ``verdict.py`` states the result. Nothing here reads files or computes a model.
"""
