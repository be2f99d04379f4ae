"""Whether the rows of a model's first dimension are independent: a proof over its graph.

Each tensor of a graph has an abstract value (``value.py``). The rules of the operators give the values of a node's
outputs from those of its inputs: one group of operators in each file. ``onnx.py`` and ``exported.py`` walk the graphs
of the two formats.
"""
