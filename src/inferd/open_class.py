"""The mark of a compiled class that interpreted classes may inherit from: the doubles of tests, and extensions.

A method of such a class is called through a table, also where no subclass is known, and its attributes may be unset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(*, allow_interpreted_subclasses):
        """Read by mypyc alone."""
        return lambda marked: marked
