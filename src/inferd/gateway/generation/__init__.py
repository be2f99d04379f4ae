"""What all dialects share that generate text: the steps of a request, its frames, and the gathering of its outputs.

Knows the router's streams. Does not know routes, and knows no dialect: a dialect gives the request's parts
(``Generation``), and writes its answers (``Reply``). Read ``answer.py`` first.
"""
