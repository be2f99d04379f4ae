"""Whether what a model is asked, and what it answers, is still like a reference of earlier requests.

Observations become counts of cells (``cells.py``), windows of counts are compared with the reference's by an exact test
(``exact.py``), and the level of each test is what keeps false alarms at the promised rate (``windows.py``).
``monitors.py`` is the one object that the server has of all this. Knows numbers and names of labels; no text, no tensor
and no request is kept.
"""
