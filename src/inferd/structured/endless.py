"""What is told of a grammar without a sentence: its answers could only be cut."""

from __future__ import annotations

from collections.abc import Mapping

from inferd.structured import regex
from inferd.structured.faults import Fault
from inferd.structured.sentences import Part, Sentences


def check(
    text: str,
    sentences: Sentences,
    start: Part,
    rules: Mapping[Part, tuple[str, int]],
    empty: Mapping[Part, int],
) -> None:
    """Raise ``Fault`` where no text that ends is a sentence of ``start``.

    ``rules``: the name of each rule and where its definition is. ``empty``: the parts that are characters of which
    there are none, and where they are.
    """
    if start not in sentences.endless():
        return
    path = sentences.reason(start)
    last = path[-1]
    if last in empty:
        raise Fault(text, empty[last], *regex.NO_CHARACTER)
    cycle = [part for part in path[path.index(last) : -1] if part in rules]
    if not cycle:
        return  # a terminal that refers to itself, which the mask engine tells
    name, offset = rules[cycle[0]]
    needed, _ = rules[cycle[1 % len(cycle)]]
    again = "itself again" if len(cycle) == 1 else f"a rule without an end, such as {needed!r}"
    raise Fault(
        text,
        offset,
        f"the rule {name!r} has no end, because each of its alternatives needs {again}",
        f"add an alternative without {needed!r}, or write '?' or '*' behind {needed!r}",
    )
