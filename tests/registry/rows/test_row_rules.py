"""The rules of operators one by one: the dimensions that come out, where the rows lie, and why a rule refuses.

A tensor is written by its dimensions, as in ``r 4 6``: ``r`` is the number of rows, ``2r`` twice as many, a letter another
size that is not known, and ``?`` in a result any such size. ``[1 2 r]`` is a vector of known elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from inferd.registry.rows import elementwise, products, recurrent, reductions, shapes, tables, value
from inferd.registry.rows.products import Window
from inferd.registry.rows.value import (
    ONE,
    Fixed,
    Inner,
    MixedRowsError,
    Rows,
    Size,
    Symbols,
    UnknownRuleError,
    Value,
    made,
    quotient,
    sizes,
    times,
)

LETTERS = "abc"
NEW = Symbols()
for _ in LETTERS:
    NEW.size()


def size(word: str) -> Size:
    if word in LETTERS:
        return Size(symbols=(LETTERS.index(word) + 1,))
    number = word.removesuffix("r")
    return Size(int(number) if number not in ("", "-") else int(number + "1"), rows=int(word.endswith("r")))


def of(words: str) -> list[Size]:
    return [size(word) for word in words.strip("[]").split()]


def t(words: str) -> Value:
    """The tensor that the words describe."""
    found = of(words)
    if words.startswith("["):
        return Fixed((Size(len(found)),), tuple(found))
    axes = [number for number, one in enumerate(found) if one.rows]
    return made(found, axes[0] if axes else None)


def inner(words: str, outer: int) -> Inner:
    found = of(words)
    return Inner(tuple(found), next(number for number, one in enumerate(found) if one.rows), Size(outer))


def f(words: str) -> Fixed:
    made_of = t(words)
    assert isinstance(made_of, Fixed)
    return made_of


def shown(one: Size) -> str:
    if one.symbols:
        is_named = one.factor == 1 and not one.rows and len(one.symbols) == 1 and one.symbols[0] <= len(LETTERS)
        return LETTERS[one.symbols[0] - 1] if is_named else "?"
    return f"{'' if one.factor == 1 and one.rows else one.factor}{'r' * one.rows}"


def told(result: object) -> str:
    """What came out, in the words of ``t``."""
    if isinstance(result, list | tuple) and not isinstance(result, Size):
        return ", ".join(map(told, result))
    if isinstance(result, Size):
        return shown(result)
    if isinstance(result, Fixed) and result.items is not None:
        return f"[{' '.join(map(shown, result.items))}]" if result.dims else shown(result.items[0])
    assert isinstance(result, Fixed | Rows)
    if result.dims is None:
        return "unknown"
    if isinstance(result, Rows):
        assert [one.rows for one in result.dims] == [number == result.axis for number in range(len(result.dims))]
    words = " ".join(map(shown, result.dims))
    return f"{words} within {shown(result.outer)}" if isinstance(result, Inner) else words


def outcome(rule: Callable[[], object]) -> str:
    try:
        return told(rule())
    except MixedRowsError as error:
        return f"mixes: {error}"
    except UnknownRuleError as error:
        return f"refused: {error}"


Rule = tuple[Callable[[], object], str]


def check(rules: Sequence[Rule]) -> None:
    """All at once: a rule takes microseconds."""
    assert [outcome(rule) for rule, _ in rules] == [expected for _, expected in rules]


def test_moves_of_dimensions() -> None:
    transpose, squeeze, unsqueeze = shapes.transpose, shapes.squeeze, shapes.unsqueeze
    check(
        [
            (lambda: transpose(t("r 4 6"), None), "6 4 r"),
            (lambda: transpose(t("r 4 6"), [-1, 0, 1]), "6 r 4"),
            (lambda: transpose(t("3 4"), [1, 0]), "4 3"),
            (lambda: transpose(t("r 4 6"), [0, 1]), "refused: has an order of axes that does not fit its input"),
            (lambda: transpose(t("r 4 6"), [0, 1, 1]), "refused: has an order of axes that does not fit its input"),
            (lambda: transpose(t("r 4 6"), [0, 1, 3]), "refused: names the axis 3 of a tensor of 3 dimensions"),
            (lambda: transpose(Fixed(tuple(of("2 3")), tuple(of("1 2 3 4 5 6"))), None), "[1 4 2 5 3 6]"),
            (lambda: shapes.slice_items(f("[1 2 3 4]"), 0, slice(1, None, 2)), "[2 4]"),
            (
                lambda: shapes.slice_items(Fixed(tuple(of("2 3")), tuple(of("1 2 3 4 5 6"))), 1, slice(1, 3)),
                "[2 3 5 6]",
            ),
            (lambda: squeeze(t("1 r 1 4"), [0, -2]), "r 4"),
            (lambda: squeeze(t("r 1"), [0]), "refused: drops the dimension of the rows"),
            (lambda: squeeze(t("1 3 1"), None), "3"),
            (lambda: squeeze(t("1 a"), None), "refused: drops whichever dimensions are 1"),
            (lambda: squeeze(t("r 1"), None), "refused: drops whichever dimensions are 1"),
            (lambda: squeeze(Fixed((ONE, ONE), (Size(7),)), [0]), "[7]"),
            (lambda: unsqueeze(t("4 r 6"), [0, -1]), "1 4 r 6 1"),
            (lambda: unsqueeze(t("4 r 6"), [1, 2]), "4 1 1 r 6"),
            (lambda: unsqueeze(t("r"), [1, -2]), "refused: adds an axis twice"),
            (lambda: unsqueeze(t("r"), [2]), "refused: names the axis 2 of a tensor of 2 dimensions"),
            (lambda: unsqueeze(Fixed((), (Size(5),)), [0]), "[5]"),
        ]
    )


def test_other_shapes_of_the_same_elements() -> None:
    def reshape(one: Value, target: str, *, zero_copies: bool = False) -> Value:
        return shapes.reshape(one, of(target), NEW, zero_copies=zero_copies)

    unknown = Fixed(None)
    check(
        [
            (lambda: reshape(t("r 4 6"), "r 24"), "r 24"),
            (lambda: reshape(t("r 4 6"), "-1 3 8"), "r 3 8"),
            (lambda: reshape(t("r 4 6"), "4r 6"), "4r 6"),
            (lambda: reshape(t("r 4 6"), "-1 6"), "4r 6"),
            (lambda: reshape(t("4 r 6"), "4r 6"), "4r 6 within 4"),
            (lambda: reshape(inner("4r 6", 4), "4 r 6"), "4 r 6"),
            (lambda: reshape(inner("4r 6", 4), "2 2r 6"), "2 2r 6 within 2"),
            (lambda: reshape(t("4 r 6"), "2 r 12"), "refused: joins the rows with the dimensions before them"),
            (lambda: reshape(t("4 r 6"), "8 r 3"), "refused: joins the rows with the dimensions before them"),
            (lambda: reshape(t("r 4 6"), "4 r 6"), "refused: joins the rows with the dimensions before them"),
            (lambda: reshape(t("r 4"), "4 -1"), "refused: joins the rows with the dimensions before them"),
            (lambda: reshape(t("r 4 6"), "r r"), "refused: reshapes the rows away"),
            (lambda: reshape(t("r 4 6"), "24"), "refused: reshapes the rows away"),
            (lambda: reshape(t("r 4 6"), "0 -1", zero_copies=True), "r 24"),
            (
                lambda: reshape(t("r 4"), "r 4 0", zero_copies=True),
                "refused: copies a dimension that its input has not",
            ),
            (lambda: reshape(t("3 0"), "3 0"), "3 0"),
            (lambda: reshape(t("r 4"), "-1 -1"), "refused: reshapes to negative sizes"),
            (lambda: reshape(t("r 4"), "-2 r"), "refused: reshapes to negative sizes"),
            (lambda: reshape(t("r a"), "r -1"), "r a"),
            (lambda: reshape(t("r 4 a"), "r 3 -1"), "r 3 ?"),
            (lambda: reshape(t("r 4 a"), "-1 3"), "refused: reshapes to unknown sizes"),
            (lambda: reshape(t("[1 2 3 4]"), "2 -1"), "[1 2 3 4]"),
            (lambda: reshape(t("3 4"), "-1"), "12"),
            (lambda: reshape(unknown, "2 3"), "2 3"),
            (lambda: reshape(unknown, "2 -1"), "unknown"),
            (lambda: reshape(unknown, "2 0"), "unknown"),
            (lambda: reshape(unknown, "r 3"), "unknown"),
        ]
    )
    assert shapes.reshape(t("[1 2 3 4]"), of("2 2"), NEW) == Fixed(tuple(of("2 2")), tuple(of("1 2 3 4")))


def test_repetitions_and_joins() -> None:
    def expand(one: str, target: str) -> Value:
        return shapes.expand(t(one), of(target), NEW)

    def concat(axis: int, *parts: str) -> Value:
        return shapes.concat([t(part) for part in parts], axis, NEW)

    def split(one: str, axis: int, parts: str | None, count: int) -> list[Value]:
        return shapes.split(t(one), axis, None if parts is None else of(parts), count, NEW)

    many = "[" + " ".join(["1"] * 33) + "]"
    check(
        [
            (lambda: expand("r 1 6", "r 4 6"), "r 4 6"),
            (lambda: expand("r 1 6", "1 4 1"), "r 4 6"),
            (lambda: expand("r 6", "2 1 1"), "2 r 6"),
            (lambda: expand("r 6", "-1 6"), "r 6"),
            (lambda: expand("1 6", "r 6"), "r 6"),
            (lambda: expand("6", "4 r 1"), "4 r 6"),
            (lambda: expand("r 6", "3 6"), "refused: expands the rows"),
            (lambda: expand("4 6", "r 6"), "refused: expands the rows"),
            (lambda: expand("r 4", "1 a"), "r ?"),
            (lambda: shapes.tile(t("r 4 6"), of("1 2 3")), "r 8 18"),
            (lambda: shapes.tile(t("1 6"), of("r 2")), "r 12"),
            (lambda: shapes.tile(t("r 6"), of("2 1")), "refused: repeats the rows"),
            (lambda: shapes.tile(t("r 6"), of("1")), "refused: repeats other dimensions than its input has"),
            (lambda: shapes.tile(t("2 6"), of("r 1")), "refused: repeats a dimension for each row"),
            (lambda: shapes.tile(t("r 1"), of("1 r")), "refused: repeats a dimension for each row"),
            (lambda: concat(1, "r 4", "r 6", "r a"), "r ?"),
            (lambda: concat(-1, "r 4", "r 6"), "r 10"),
            (lambda: concat(0, "3 a", "2 5"), "5 5"),
            (lambda: concat(0, "3 a", "2 a"), "5 a"),
            (lambda: concat(0, "r 4", "r 4"), "mixes: joins rows with other rows"),
            (lambda: concat(1, "r 4", "3 4"), "refused: joins rows along different dimensions"),
            (lambda: concat(1, "r 4", "2r 4"), "refused: joins different numbers of rows"),
            (lambda: concat(0, "r 4", "4"), "refused: joins tensors of different ranks"),
            (lambda: concat(0, "[1 r]", "[2]"), "[1 r 2]"),
            (lambda: concat(0, many, "[" + " ".join(["1"] * 31) + "]"), "[" + " ".join(["1"] * 64) + "]"),
            (lambda: concat(0, many, "[" + " ".join(["1"] * 32) + "]"), "65"),
            (lambda: concat(0, many, "[" + " ".join(["r"] * 32) + "]"), "refused: computes with the number of rows"),
            (lambda: split("r 4 6", 1, None, 2), "r 2 6, r 2 6"),
            (lambda: split("r 5 6", 1, None, 2), "r ? 6, r ? 6"),
            (lambda: split("r 4 6", -1, "1 5", 2), "r 4 1, r 4 5"),
            (lambda: split("r 4 6", -1, "1 5", 3), "r 4 2, r 4 2, r 4 2"),
            (lambda: split("r 4 6", 0, None, 2), "mixes: splits the rows into parts"),
            (lambda: shapes.keeps(t("r 4 6"), [-1, 1], of("7 a"), "rolls"), "r a 7"),
            (lambda: shapes.keeps(t("4 r 6"), [0, 1], of("7 7"), "rolls"), "mixes: rolls"),
        ]
    )


def test_picks_of_elements() -> None:
    def gather(data: str, indices: str, axis: int = 0) -> Value:
        return shapes.gather(t(data), t(indices), axis)

    elements, scatter = shapes.gather_elements, shapes.scatter_elements

    def nd(data: str, indices: str, batch: int = 0) -> Value:
        return shapes.gather_nd(t(data), t(indices), batch)

    check(
        [
            (lambda: gather("r 4 6", "3", 1), "r 3 6"),
            (lambda: gather("4 r 6", "3 2", 0), "3 2 r 6"),
            (lambda: gather("4 r 6", "3 2", -1), "4 r 3 2"),
            (lambda: gather("5 6", "4 r", 1), "5 4 r"),
            (lambda: gather("r 4", "3", 0), "mixes: picks single rows"),
            (lambda: gather("r 4", "r", 1), "mixes: picks for each row from all rows"),
            (lambda: gather("[5 6 7]", "[0 -1]"), "[5 7]"),
            (lambda: gather("[5 6 7]", "[-3 2]"), "[5 7]"),
            (lambda: gather("[5 6 7]", "[0 3]"), "2"),
            (lambda: gather("[5 6 7]", "[0 -4]"), "2"),
            (lambda: gather("[5 6 7]", "2"), "2"),
            (lambda: gather("[5 r 7]", "2"), "refused: computes with the number of rows"),
            (lambda: shapes.gather(t("[5 r 7]"), Fixed((), (ONE,)), 0), "r"),
            (lambda: elements(t("r 4 6"), t("r 4 2"), 2), "r 4 2"),
            (lambda: elements(t("5 4"), t("5 2"), 1), "5 2"),
            (lambda: elements(t("r 4"), t("r 4"), 0), "mixes: picks elements of other rows"),
            (lambda: elements(t("r 4"), t("3 4"), 1), "refused: picks from a tensor whose rows lie elsewhere"),
            (lambda: elements(t("r 4"), t("2r 4"), 1), "refused: picks from another number of rows"),
            (lambda: elements(t("r 4"), t("r"), 0), "refused: has indices of another rank"),
            (lambda: scatter(t("r 4 6"), t("r 4 2"), t("r 4 2"), 2), "r 4 6"),
            (lambda: scatter(t("r 4"), t("r 2"), t("5 2"), 1), "refused: picks from a tensor whose rows lie elsewhere"),
            (lambda: nd("5 6 7", "3 2"), "3 7"),
            (lambda: nd("5 6 7", "3 3"), "3"),
            (lambda: nd("5 6", "r 2 1"), "r 2 6"),
            (lambda: nd("4 5 r 6", "3 2"), "3 r 6"),
            (lambda: nd("r 5 6", "r 3 1", 1), "r 3 6"),
            (lambda: nd("2 4 5 r", "2 3 1", 1), "2 3 5 r"),
            (lambda: nd("r 5 6", "2r 3 1", 1), "refused: picks from all rows"),
            (lambda: nd("r 5 6", "3 1"), "refused: picks from all rows"),
            (lambda: nd("5 6", "r 2 1", 1), "refused: picks for each row from all rows"),
            (lambda: nd("5 6", "3 3"), "refused: picks by indices of unknown length"),
            (lambda: nd("5 6", "3 0"), "refused: picks by indices of unknown length"),
            (lambda: nd("5 6", "3 a"), "refused: picks by indices of unknown length"),
            (lambda: nd("5 6 7", "5 3", 1), "refused: picks by indices of unknown length"),
        ]
    )


def test_blocks_between_depth_and_space() -> None:
    def blocks(one: str, block: int, *, is_inverse: bool = False) -> Value:
        return shapes.depth_to_space(t(one), block, is_inverse=is_inverse)

    check(
        [
            (lambda: blocks("r 8 2 3", 2), "r 2 4 6"),
            (lambda: blocks("r 2 4 6", 2, is_inverse=True), "r 8 2 3"),
            (lambda: blocks("5 8 2 3", 2), "5 2 4 6"),
            (lambda: blocks("r 8 2 3", 1), "r 8 2 3"),
            (lambda: blocks("r 6 2 3", 2), "refused: moves blocks that do not fit its input"),
            (lambda: blocks("r 2 4 5", 2, is_inverse=True), "refused: moves blocks that do not fit its input"),
            (lambda: blocks("8 r 2 3", 2), "mixes: moves rows into other dimensions"),
            (lambda: blocks("r 8 2", 2), "mixes: moves rows into other dimensions"),
            (lambda: blocks("r 8 2 3", 0), "mixes: moves rows into other dimensions"),
        ]
    )


def test_elements_at_the_same_places() -> None:
    def broadcast(*values: Value) -> Value:
        return elementwise.broadcast(values, NEW)

    check(
        [
            (lambda: broadcast(t("r 4 6"), t("6")), "r 4 6"),
            (lambda: broadcast(t("r 1 6"), t("4 1")), "r 4 6"),
            (lambda: broadcast(t("r 6"), t("2 1 1")), "2 r 6"),
            (lambda: broadcast(t("3 a"), t("3 5")), "3 5"),
            (lambda: broadcast(t("3 a"), t("3 b")), "3 ?"),
            (lambda: broadcast(t("3 a"), t("3 0")), "3 ?"),
            (lambda: broadcast(t("3 4"), t("3 5"), t("3 a")), "3 ?"),
            (broadcast, ""),
            (lambda: broadcast(t("r 4"), t("3 4")), "refused: meets the rows with another dimension"),
            (lambda: broadcast(t("r 4"), t("r")), "refused: meets rows along different dimensions"),
            (lambda: broadcast(t("r 4"), t("[1 r 3 4]")), "refused: computes with the number of rows"),
            (lambda: broadcast(Fixed(None), t("3")), "unknown"),
            (lambda: broadcast(Fixed(None), t("r 3")), "refused: takes a tensor of unknown shape"),
            (lambda: broadcast(inner("4r 6", 4), t("6")), "4r 6 within 4"),
            (lambda: broadcast(inner("4r 6", 4), inner("4r 6", 4)), "4r 6 within 4"),
            (lambda: broadcast(inner("4r 6", 4), inner("4r 6", 2)), "refused: meets rows along different dimensions"),
            (lambda: broadcast(inner("4r 6", 4), t("4r 6")), "refused: meets rows along different dimensions"),
            (lambda: broadcast(inner("4r 1", 4), t("6")), "refused: meets rows along different dimensions"),
        ]
    )


def test_arithmetic_of_sizes() -> None:
    def on(operation: elementwise.Operation, one: str, other: str) -> Size:
        return operation(NEW, size(one), size(other))

    e = elementwise
    check(
        [
            (lambda: on(e.add, "2", "3"), "5"),
            (lambda: on(e.add, "2r", "r"), "3r"),
            (lambda: on(e.add, "0", "r"), "r"),
            (lambda: on(e.add, "a", "0"), "a"),
            (lambda: on(e.add, "a", "1"), "?"),
            (lambda: on(e.add, "r", "1"), "refused: computes with the number of rows"),
            (lambda: on(e.sub, "2r", "r"), "r"),
            (lambda: on(e.sub, "r", "r"), "0"),
            (lambda: on(e.sub, "2", "3"), "-1"),
            (lambda: on(e.mul, "2", "r"), "2r"),
            (lambda: on(e.div, "6r", "3"), "2r"),
            (lambda: on(e.div, "r", "r"), "1"),
            (lambda: on(e.div, "7", "2"), "?"),
            (lambda: on(e.div, "r", "2"), "refused: computes with the number of rows"),
            (lambda: on(e.mod, "7", "4"), "3"),
            (lambda: on(e.mod, "0", "4"), "0"),
            (lambda: on(e.mod, "-7", "4"), "?"),
            (lambda: on(e.mod, "7", "0"), "?"),
            (lambda: on(e.mod, "7", "-4"), "?"),
            (lambda: on(e.mod, "7", "a"), "?"),
            (lambda: on(e.least, "2", "3"), "2"),
            (lambda: on(e.most, "2", "3"), "3"),
            (lambda: on(e.least, "r", "r"), "r"),
            (lambda: on(e.most, "a", "a"), "a"),
            (lambda: on(e.least, "2", "a"), "?"),
            (lambda: on(e.most, "a", "2"), "?"),
            (lambda: on(e.most, "r", "2"), "refused: computes with the number of rows"),
            (lambda: on(e.equal, "r", "r"), "1"),
            (lambda: on(e.equal, "2", "3"), "0"),
            (lambda: on(e.equal, "r", "-1"), "0"),
            (lambda: on(e.equal, "-1", "a"), "0"),
            (lambda: on(e.equal, "a", "0"), "?"),
            (lambda: on(e.equal, "r", "0"), "refused: computes with the number of rows"),
            (lambda: on(e.equal, "-1r", "-1"), "refused: computes with the number of rows"),
            (lambda: e.equal(NEW, NEW.number("may be negative"), Size(-1)), "?"),
            (lambda: NEW.number("key") == NEW.number("key") and ONE, "1"),
            (lambda: e.on_items([t("[1 2]"), t("[3 r]")], e.mul, NEW), "[3 2r]"),
            (lambda: e.on_items([t("[1 2]"), t("[3]")], e.add, NEW), "[4 5]"),
            (lambda: e.on_items([Fixed((), (Size(2),)), Fixed((), (Size(3),))], e.sub, NEW), "-1"),
            (lambda: e.on_items([t("[1 2]"), t("[1 2 3]")], e.add, NEW), "refused: computes with sizes that do not fit each other"),
            (lambda: e.on_items([t("[1 2]"), t("r 2")], e.add, NEW), "r 2"),
            (lambda: e.on_items([Fixed((ONE, ONE), (ONE,)), t("[1 2]")], e.add, NEW), "1 2"),
            (lambda: e.choose(t("[1 0 1]"), t("[1 2 3]"), t("[4 5 6]"), NEW), "[1 5 3]"),
            (lambda: e.choose(t("[0]"), t("[1 2 3]"), t("[r]"), NEW), "[r r r]"),
            (lambda: e.choose(t("[1 0]"), t("[r]"), t("[7]"), NEW), "[r 7]"),
            (lambda: e.choose(t("[a a]"), t("[1 2]"), t("[1 3]"), NEW), "[1 ?]"),
            (lambda: e.choose(t("[a]"), t("[r]"), t("[1]"), NEW), "refused: computes with the number of rows"),
            (lambda: e.choose(t("r 2"), t("[1 2]"), t("[3 4]"), NEW), "r 2"),
        ]
    )  # fmt: skip


def test_products_of_sizes_and_axes_by_their_numbers() -> None:
    most = Size(symbols=(1,) * 16)
    check(
        [
            (lambda: times(Size(2), Size(3, rows=1)), "6r"),
            (lambda: times(Size(0), Size(3, (1,), 1)), "0"),
            (lambda: times(Size(1 << 62)), str(1 << 62)),
            (lambda: times(Size(1 << 62), Size(-2)), "refused: computes with sizes that are too large"),
            (lambda: times(most), "?"),
            (lambda: times(most, size("a")), "refused: computes with sizes that are too large"),
            (lambda: quotient(times(size("6r"), size("a")), times(size("2"), size("a"))) or "none", "3r"),
        ]
    )
    assert (value.place(-2, 2), value.place(1, 2)) == (0, 1)
    for axis in (2, -3):
        with pytest.raises(UnknownRuleError, match=f"names the axis {axis} of a tensor of 2 dimensions"):
            value.place(axis, 2)
    check(
        [
            (lambda: made([ONE] * 65, None), "refused: has too many dimensions"),
            (lambda: made([ONE] * 64, None), " ".join(["1"] * 64)),
            (lambda: made(of("r 4"), 1), "refused: has the number of rows in another dimension"),
            (lambda: made([Size(rows=2)], 0), "refused: has the number of rows in another dimension"),
        ]
    )
    for whole, by in (("7", "2"), ("7", "0"), ("2", "r"), ("2", "a"), ("a", "b")):
        assert quotient(size(whole), size(by)) is None
    assert quotient(Size(1, (1, 1)), Size(1, (1,))) == Size(1, (1,))
    assert value.numbers_of(t("[1 -2]")) == (1, -2)
    assert value.numbers_of(t("[1 r]")) is value.numbers_of(t("3")) is value.numbers_of(None) is None


def test_of_several_mixed_tensors_the_one_of_which_most_is_known_counts() -> None:
    moved, named, unread = value.Mixed("a", True), value.Mixed("b", False, True), value.Mixed("c", False)
    assert value.worst([unread, named, t("r 4"), None, moved]) is moved
    assert value.worst([unread, named]) is named
    assert value.worst([t("r 4"), None]) is None
    assert value.supposed([t("r 4"), t("3"), t("2r 5")], NEW) is not None
    assert value.supposed([t("r 4"), t("4 r")], NEW) is None
    assert value.supposed([inner("4r 6", 4)], NEW) is value.supposed([t("3")], NEW) is None
    supposed = value.supposed([t("4 2r 6")], NEW)
    assert supposed is not None
    assert told(supposed) == "? r ?"


def test_products_of_matrices() -> None:
    def matmul(one: str, other: str) -> Value:
        return products.matmul(t(one), t(other), NEW)

    def gemm(one: Value, other: Value, bias: Value | None = None, *, a: bool = False, b: bool = False) -> Value:
        return products.gemm(one, other, bias, NEW, turns_one=a, turns_other=b)

    rows, sums = "mixes: multiplies each row with all rows", "mixes: sums over the rows"
    joined = "refused: takes rows that are joined with the dimensions before them"
    check(
        [
            (lambda: matmul("r 4", "4 5"), "r 5"),
            (lambda: matmul("r 4 6", "6 5"), "r 4 5"),
            (lambda: matmul("r 4 6", "6"), "r 4"),
            (lambda: matmul("4 r 6", "4 6 5"), "4 r 5"),
            (lambda: matmul("3 4", "r 4 6"), "r 3 6"),
            (lambda: matmul("3 4", "4 r"), "3 r"),
            (lambda: matmul("4", "4 r"), "r"),
            (lambda: matmul("r 3 4", "r 4 6"), "r 3 6"),
            (lambda: matmul("6", "6"), ""),
            (lambda: matmul("", "6"), "refused: multiplies a scalar as a matrix"),
            (lambda: matmul("6", ""), "refused: multiplies a scalar as a matrix"),
            (lambda: matmul("4 r", "r 4"), sums),
            (lambda: matmul("4 r", "5 4"), sums),
            (lambda: matmul("4 5", "r 4"), sums),
            (lambda: matmul("4 5", "r"), sums),
            (lambda: matmul("4 5", "3 r 4"), sums),
            (lambda: matmul("r 4", "4 r"), rows),
            (lambda: matmul("r 4", "r 4 5"), rows),
            (lambda: matmul("r 3 4", "4 r"), rows),
            (lambda: gemm(t("r 4"), t("4 5")), "r 5"),
            (lambda: gemm(t("4 r"), t("5 4"), a=True, b=True), "r 5"),
            (lambda: gemm(t("5 4"), t("4 r")), "5 r"),
            (lambda: gemm(t("5 4"), t("r 4"), b=True), "5 r"),
            (lambda: gemm(t("3 4"), t("4 5"), t("5")), "3 5"),
            (lambda: gemm(t("1 4"), t("4 5"), t("r 5")), "refused: has the number of rows in another dimension"),
            (lambda: gemm(t("r 4"), t("4 5"), t("r 1")), "r 5"),
            (lambda: gemm(t("r 4"), t("4 5"), t("2 1 5")), "r 5"),
            (lambda: gemm(t("r 4"), t("4 5"), t("3 5")), "refused: meets the rows with another dimension"),
            (lambda: gemm(t("r 4 1"), t("4 5")), "refused: multiplies tensors that are no matrices"),
            (lambda: gemm(t("r 4"), t("4")), "refused: multiplies tensors that are no matrices"),
            (lambda: gemm(t("r 4"), t("4 5"), a=True), sums),
            (lambda: gemm(t("4 r"), t("4 5")), sums),
            (lambda: gemm(t("3 4"), t("r 4")), sums),
            (lambda: gemm(t("3 4"), t("4 r"), b=True), sums),
            (lambda: gemm(t("r 4"), t("4 r")), rows),
            (lambda: gemm(inner("4r 6", 4), t("6 5"), t("5")), "4r 5 within 4"),
            (lambda: gemm(inner("4r 6", 4), t("5 6"), b=True), "4r 5 within 4"),
            (lambda: gemm(inner("4r 6", 4), t("6 5"), t("4r 5")), joined),
            (lambda: gemm(inner("6 4r", 4), t("6 5"), a=True), joined),
            (lambda: gemm(t("5 6"), inner("6 4r", 4)), joined),
            (lambda: gemm(t("4r 6"), t("6 5"), inner("4r 5", 4)), joined),
        ]
    )


def test_sums_over_indices() -> None:
    def einsum(equation: str, *values: str) -> Value:
        return products.einsum(equation, [t(one) for one in values], NEW)

    check(
        [
            (lambda: einsum("bij, jk -> bki", "r 4 6", "6 5"), "r 5 4"),
            (lambda: einsum("ij,ij->ij", "r 1", "r 6"), "r 6"),
            (lambda: einsum("ij->ji", "r 6"), "6 r"),
            (lambda: einsum("ij->i", "r 6"), "r"),
            (lambda: einsum("ij->j", "r 6"), "mixes: sums over the rows"),
            (lambda: einsum("ij->iij", "r 6"), "mixes: sums over the rows"),
            (lambda: einsum("i,j->ij", "r", "r"), "mixes: multiplies each row with all rows"),
            (lambda: einsum("ii->i", "1 r"), "refused: meets the rows with another dimension"),
            (lambda: einsum("ij,ij->ij", "r 6", "1 6"), "refused: meets different numbers of rows"),
            (lambda: einsum("ij,ij->ij", "1 6", "r 6"), "refused: meets the rows with another dimension"),
            (lambda: einsum("ij,ij->ij", "r 6", "2r 6"), "refused: meets different numbers of rows"),
            (lambda: einsum("ij,ij->ij", "r 6", "3 6"), "refused: meets different numbers of rows"),
            (lambda: einsum("ij->ik", "r 6"), "refused: gives a dimension that its inputs have not"),
            (lambda: einsum("ij,j->i", "r 6"), "refused: sums over other inputs than it has"),
            (lambda: einsum("i->i", "r 6"), "refused: sums over other dimensions than its inputs have"),
            (lambda: einsum("...j->...", "r 6"), "refused: sums over indices that are left open"),
            (lambda: einsum("ij", "r 6"), "refused: sums over indices that are left open"),
            (lambda: einsum("ij,jk->ik", "3 4", "4 5"), "3 5"),
        ]
    )


def test_windows_that_move() -> None:
    def moved(one: str, channels: str | None = "5", weight: str | None = "5 4 3", **window: object) -> Value:
        return products.convolution(
            t(one),
            None if weight is None else t(weight),
            None if channels is None else size(channels),
            Window(**{"kernel": (3,), **window}),  # type: ignore[arg-type]
            NEW,
        )

    check(
        [
            (lambda: moved("r 4 6"), "r 5 4"),
            (lambda: moved("r 4 3"), "r 5 1"),
            (lambda: moved("r 4 2"), "r 5 ?"),
            (lambda: moved("r 4 6", None, None), "r 4 4"),
            (lambda: moved("2 4 6"), "2 5 4"),
            (lambda: moved("r 4 7", strides=(2,)), "r 5 3"),
            (lambda: moved("r 4 6", strides=(2,)), "r 5 2"),
            (lambda: moved("r 4 6", pads=(1, 2)), "r 5 7"),
            (lambda: moved("r 4 6", pads=(1,)), "r 5 ?"),
            (lambda: moved("r 4 6", dilations=(2,)), "r 5 2"),
            (lambda: moved("r 4 6", strides=(0,)), "r 5 ?"),
            (lambda: moved("r 4 6", strides=(1, 1)), "r 5 ?"),
            (lambda: moved("r 4 6", dilations=(1, 1)), "r 5 ?"),
            (lambda: moved("r 4 7", strides=(2,), is_same=True), "r 5 4"),
            (lambda: moved("r 4 6", is_open=True), "r 5 ?"),
            (lambda: moved("r 4 6", kernel=()), "r 5 ?"),
            (lambda: moved("r 4 a"), "r 5 ?"),
            (lambda: moved("r 4 6 8", kernel=(3, 1), strides=(1, 2), pads=(1, 0, 0, 2), dilations=(2, 1)), "r 5 3 5"),
            (lambda: moved("r 4"), "refused: has no dimension to move a window along"),
            (lambda: moved("4 r 6"), "mixes: sums over the rows"),
            (lambda: moved("4 6 r"), "mixes: moves a window along the rows"),
            (lambda: moved("r 4 6", weight="r 4 3"), "refused: takes its weights from the rows"),
            (lambda: products.per_channel(t("r 4 6"), [t("4"), None]), "r 4 6"),
            (lambda: products.per_channel(t("4 r"), [t("4")]), "refused: has the rows as channels"),
            (lambda: products.per_channel(t("r 4"), [t("r")]), "refused: takes its numbers from the rows"),
        ]
    )


def test_whole_axes() -> None:
    def reduce(one: Value, axes: Sequence[int] | None, *, keeps: bool = False) -> Value:
        return reductions.reduce(one, axes, keeps_dims=keeps)

    check(
        [
            (lambda: reduce(t("4 r 6"), [0]), "r 6"),
            (lambda: reduce(t("4 r 6"), [0, -1], keeps=True), "1 r 1"),
            (lambda: reduce(t("4 6"), None), ""),
            (lambda: reduce(t("4 6"), None, keeps=True), "1 1"),
            (lambda: reduce(t("r 6"), [-2]), "mixes: reduces over the rows"),
            (lambda: reduce(t("r 6"), None), "mixes: reduces over the rows"),
            (lambda: reduce(Fixed(None), [0]), "unknown"),
            (lambda: reduce(t("[1 r]"), [0]), "refused: computes with the number of rows"),
            (lambda: reductions.along(t("r 4 6"), [1, -1], "sorts"), "r 4 6"),
            (lambda: reductions.along(t("r 4 6"), [1, -3], "sorts"), "mixes: sorts"),
            (lambda: reductions.norm(t("r 4"), [0]), "mixes: normalises over the rows"),
            (lambda: reductions.best(t("r 4 6"), -2, Size(2)), "r 2 6"),
            (lambda: reductions.best(t("r 4 6"), 0, Size(2)), "mixes: orders the rows"),
        ]
    )


def test_layers_that_carry_a_state() -> None:
    def layer(one: str, *states: str, lengths: str | None = None, first: bool = False, weight: str = "8 4") -> object:
        return recurrent.recurrent(
            t(one),
            [t(weight), None],
            None if lengths is None else t(lengths),
            [t(state) for state in states],
            hidden=Size(8),
            directions=2,
            batch_first=first,
            kind="GRU",
        )

    others = "refused: begins with states of another number of rows"
    check(
        [
            (lambda: layer("7 r 4"), "7 2 r 8, 2 r 8"),
            (lambda: layer("r 7 4", first=True), "r 7 2 8, r 2 8"),
            (lambda: layer("7 3 4", "2 3 8", lengths="3"), "7 2 3 8, 2 3 8"),
            (lambda: layer("7 r 4", "2 r 8", lengths="r"), "7 2 r 8, 2 r 8"),
            (lambda: layer("r 7 4", "r 2 8", first=True), "r 7 2 8, r 2 8"),
            (lambda: layer("7 r 4", "2 3 8"), others),
            (lambda: layer("7 r 4", "2 2r 8"), others),
            (lambda: layer("7 r 4", "r 2 8"), others),
            (lambda: layer("7 r 4", lengths="3"), others),
            (lambda: layer("7 3 4", "2 r 8"), "refused: begins with states of rows that its input has not"),
            (lambda: layer("7 3 4", lengths="r"), "refused: begins with states of rows that its input has not"),
            (lambda: layer("7 4 r"), "mixes: sums over the rows"),
            (lambda: layer("r 4"), "refused: has no sequence as its input"),
            (lambda: layer("7 r 4", weight="r 4"), "refused: takes its weights from the rows"),
            (lambda: recurrent.hidden_size(t("2 24 8"), NEW), "8"),
            (lambda: recurrent.hidden_size(t("r 8"), NEW), "?"),
            (lambda: recurrent.hidden_size(t(""), NEW), "?"),
            (lambda: recurrent.hidden_size(None, NEW), "?"),
        ]
    )
    for words, first in (("r 7 4", False), ("7 r 4", True)):
        assert outcome(lambda words=words, first=first: layer(words, first=first)).startswith(  # type: ignore[misc]
            "mixes: carries the state of its GRU from row to row"
        )


def test_tables_of_features() -> None:
    no_table, all_rows = "refused: takes a tensor that is no table of rows", "refused: picks for each row from all rows"
    check(
        [
            (lambda: tables.by_row(t("r 4")), "r 4"),
            (lambda: tables.by_row(t("3 4")), "3 4"),
            (lambda: tables.by_row(t("4 r")), no_table),
            (lambda: tables.by_row(t("r 4 1")), no_table),
            (lambda: tables.by_row(t("r")), no_table),
            (lambda: tables.scores(t("r 4"), NEW), "r ?"),
            (lambda: tables.labels(t("r 4")), "r"),
            (lambda: tables.encoded(t("r 4"), NEW), "r 4 ?"),
            (lambda: tables.extracted(t("r 4"), t("3")), "r 3"),
            (lambda: tables.extracted(t("r 4"), t("3 2")), "r 6"),
            (lambda: tables.extracted(t("5 4"), t("r")), "5 r"),
            (lambda: tables.extracted(t("4"), t("r 2")), "1 2r"),
            (lambda: tables.extracted(t("4"), t("1 r")), "1 r"),
            (lambda: tables.extracted(t("4"), t("2 r")), all_rows),
            (lambda: tables.extracted(t("r 4"), t("r")), all_rows),
            (lambda: tables.extracted(t("4 r"), t("2")), "mixes: picks single rows"),
            (lambda: tables.joined([t("r 4"), t("r 5")], NEW), "r ?"),
            (lambda: tables.joined([t("r 4"), t("2r 5")], NEW), "refused: joins tables of different numbers of rows"),
            (lambda: tables.joined([t("r 4"), t("3 5")], NEW), "refused: joins tables of different numbers of rows"),
        ]
    )


def test_a_size_is_known_without_symbols_and_rows() -> None:
    assert sizes([3, -1]) == (Size(3), Size(-1))
    assert [size(word).number for word in ("3", "-1", "a", "r")] == [3, -1, None, None]
