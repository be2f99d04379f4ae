"""Why a request was slow: a record of every call, what is usual, the causes, and one sentence.

Start with ``recorder.py``, which is all that runs for every call: it makes a record and keeps it. ``explain.py`` reads
records, with ``record.py`` (what is kept of a call, and the parts of its time), ``store.py`` (which records are kept),
``usual.py``, ``pressure.py`` (the machine's evidence), ``causes.py`` and ``sentence.py``.
"""

from __future__ import annotations

from inferd.observe.why.explain import Explainer, RecordLine, RecordReport

__all__ = ["Explainer", "RecordLine", "RecordReport"]
