"""How many replicas a model has by its load: the decision, what it is made of, and a simulator of both.

``decide`` and ``meter`` are functions of values. ``controller`` calls them in the event loop and has the router act.
"""
