"""JSON Schemas that constrain answers: which are accepted, which instances their masks allow, and random answers.

    python -m bench.schemas --data DIR                       every table
    python -m bench.schemas --data DIR suites                draft7, draft2019-09 and draft2020-12 of the official suite
    python -m bench.schemas --data DIR real --every 14       every 14th of the real schemas (maskbench)
    python -m bench.schemas --data DIR walks --seconds 600 --walks 1000000

DIR has `jsonschema-test-suite` (json-schema-org/JSON-Schema-Test-Suite) and `jsonschema-maskbench`
(guidance-ai/jsonschemabench, `maskbench/data`, one `.jsonl.gz` per category); INFERD_BENCH_DATA names it as well.

An instance is *right* where the masks allow a valid one and forbid an invalid one. Masks fix the order of an object's
properties and the spelling of numbers, so an instance is written in an order and with numbers that they allow (`2` for
`2.0`), where there are such. A schema that is refused counts
as right where no instance can be valid. A random walk chooses one allowed byte after the other; the whole text is then
read by the independent validator. Exit status 1: an invalid instance or walk was allowed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from inferd.answer_form import JsonSchema
from inferd.errors import InvalidRequest
from inferd.structured.check import Validator
from inferd.structured.grammar_text import Form, parts_of
from inferd.structured.names import Place, QuoteTokens
from inferd.structured.refused import refusal_of
from inferd.structured.schema import drafts, validation

DRAFTS = ("draft7", "draft2019-09", "draft2020-12")
END = 256  # the token that ends an answer; the others are the 256 bytes
LONG = (5, 20, 60)  # bytes of a walk after which closing bytes are preferred; each walk has one of these
LONGEST = 3_000
MOST_TRIES = 20_000  # of members and items, to find an order of properties that is allowed
LONGEST_OF_ONE_S = 20.0  # for the walks under one schema
CLOSING = frozenset(b'"]}')
TURNING = CLOSING | frozenset(b",:")


class _Bytes:
    is_tokenizer_wrapper = True
    eos_token_id = END
    bos_token_id = None
    special_token_ids = (END,)
    tokens = (*(bytes([value]) for value in range(256)), b"\xff<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class Refused(Exception):
    """The schema is refused, by the normaliser or by the mask engine."""

    def __init__(self, by: str, message: str) -> None:
        super().__init__(message)
        self.by = by


class Masks:
    """The masks of one schema, byte by byte."""

    _quotes = QuoteTokens(_Bytes.tokens[:END])
    _tokens = LLTokenizer(_Bytes(), n_vocab=END + 1, slices=[])  # type: ignore[arg-type]

    def __init__(self, schema: Any) -> None:
        start = time.perf_counter()
        constraint = JsonSchema(schema=schema, at="schema")
        try:
            parts = parts_of(constraint)
            # The integers of draft 4 have no decimal point, those of all others may have one.
            self._has_plain = validation.draft_of(schema, "schema") != drafts.Draft.DRAFT4
        except InvalidRequest as refusal:
            raise Refused(
                "unsatisfiable" if _is_unsatisfiable(refusal.message) else "pointer", refusal.message
            ) from None
        self.normalise_s = time.perf_counter() - start
        self._has_rules_for_names = "patternProperties" in json.dumps(parts)
        self._grammar = parts
        self._matcher = self._new(parts)
        problem = _problem(self._matcher)
        if problem is not None:
            message = refusal_of(Form(constraint, None), problem, lambda tried: _problem(self._new(tried))).message
            raise Refused("pointer" if message.startswith("schema: at /") else "engine", message)
        self._normal = parts[0]["json_schema"]
        self._tries, self._is_spent = 0, False
        self.compile_s = time.perf_counter() - start - self.normalise_s

    def _new(self, parts: Sequence[dict[str, Any]]) -> LLMatcher:
        """A matcher with a lexer of its own. Copies share theirs, and so the limits of its size."""
        limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
        return LLMatcher(self._tokens, json.dumps({"grammars": parts}), log_level=0, limits=limits)

    def _renew(self) -> None:
        """Go back to the start, with a new lexer where the limits of the last one were reached."""
        if self._is_spent or self._matcher.get_error():
            self._matcher, self._is_spent = self._new(self._grammar), False
        self._matcher.reset()

    def allow(self, value: Any) -> bool:
        """Whether the value can be written, with the properties of objects in the order of some alternative."""
        self._tries = 0
        self._renew()
        return any(end.is_accepting() for end in self._write(self._matcher, value, self._normal))

    def _write(self, start: LLMatcher, value: Any, schema: Any) -> Iterator[LLMatcher]:
        """The states of the matcher behind the value, in all the orders of its properties that the schema has."""
        if isinstance(value, dict):
            for order, inner in self._orders(value, schema):
                yield from self._parts(
                    self._after(start, "{"), [(_start_of(n), value[n], inner[n]) for n in order], "}"
                )
        elif isinstance(value, list):
            for items in self._positions(value, schema):
                yield from self._parts(
                    self._after(start, "["), [("", *item) for item in zip(value, items, strict=True)], "]"
                )
        else:
            texts = [json.dumps(value, ensure_ascii=False)]
            if isinstance(value, float) and self._has_plain:
                texts.append(_plain(value))
            yield from (state for text in texts if (state := self._after(start, text)) is not None)

    def _parts(self, at: LLMatcher | None, parts: list[tuple[str, Any, Any]], end: str) -> Iterator[LLMatcher]:
        """The states behind members or items, written one after the other with commas between them."""
        waiting = [iter(() if at is None else (at,))]
        while waiting:
            state = next(waiting[-1], None)
            if state is None:
                waiting.pop()
                continue
            done = len(waiting) - 1
            if done == len(parts):
                if (closed := self._after(state, end)) is not None:
                    yield closed
                continue
            self._tries += 1
            if self._tries > MOST_TRIES:
                return
            before, value, schema = parts[done]
            begun = self._after(state, (", " if done else "") + before)
            waiting.append(iter(()) if begun is None else self._write(begun, value, schema))

    def _orders(self, value: dict[str, Any], schema: Any) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """The distinct orders of the properties in the alternatives of a schema, with the schemas of their values."""
        known: dict[tuple[str, ...], dict[str, Any]] = {}
        for option in self._options(schema, "object"):
            named = option.get("properties", {})
            if any(name not in value for name in option.get("required", ())):
                continue
            order = [name for name in named if name in value] + [name for name in value if name not in named]
            inner = known.setdefault(tuple(order), {name: [] for name in order})
            for name in order:
                inner[name].append(named.get(name, True))
                inner[name] += [*option.get("patternProperties", {}).values(), option.get("additionalProperties", True)]
        yield from ((list(order), inner) for order, inner in known.items())

    def _positions(self, value: list[Any], schema: Any) -> Iterator[list[Any]]:
        inner: list[list[Any]] = [[] for _ in value]
        options = self._options(schema, "array")
        for option in options:
            first = option.get("prefixItems", [])
            for position, known in enumerate(inner):
                known.append(first[position] if position < len(first) else option.get("items", True))
        if options:
            yield inner

    def _options(self, schema: Any, kind: str) -> list[Any]:
        """The alternatives of one type, behind references. A list stands for alternatives."""
        found: dict[int, Any] = {}
        rest, seen = [schema], set()
        while rest:
            each = rest.pop()
            if isinstance(each, list):
                rest.extend(reversed(each))
            elif not isinstance(each, dict):
                found.update({id(each): {}} if each else {})
            elif "$ref" in each:
                name = each["$ref"].rpartition("/")[2]
                if name not in seen:
                    seen.add(name)
                    rest.append(self._normal["$defs"][name])
            elif "anyOf" in each:
                rest.extend(reversed(each["anyOf"]))
            elif each.get("type", kind) == kind:
                found[id(each)] = each
        return list(found.values())

    def _after(self, matcher: LLMatcher, text: str) -> LLMatcher | None:
        """The state behind a text; `None` where the text is not allowed."""
        matcher = matcher.deep_copy()
        data = list(text.encode())
        if matcher.try_consume_tokens(data) == len(data):
            return matcher
        self._is_spent |= bool(matcher.get_error())
        return None

    def _mask_behind(self, data: Sequence[int]) -> np.ndarray:
        matcher = self._matcher.deep_copy()
        matcher.consume_tokens(list(data))
        return np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)

    def walk(self, random_: random.Random) -> str | None:
        """A text of allowed bytes; `None` where it does not end."""
        self._renew()
        matcher = self._matcher
        text = bytearray()
        long = random_.choice(LONG)
        place: Place | None = Place()
        while len(text) < LONGEST:
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                return None  # more work than a token may take
            if place is not None and place.name is not None:  # a byte can repeat a name where it ends one
                row = np.frombuffer(mask, dtype=np.int32).copy()
                self._quotes.ban(row, place, self._mask_behind if self._has_rules_for_names else None)
                mask = row.tobytes()
            bits = int.from_bytes(mask, "little") & _EVERY
            if len(text) > long:
                bits = bits & _ENDING or bits
            elif random_.random() < 0.3:
                bits = bits & _TURNING or bits
            if not bits:
                return None
            if bits in _ALONE and (data := matcher.compute_ff_bytes()):
                matcher.consume_tokens(list(data))
                text += data
                place = place and place.after(data)
                continue
            among = _set_in(bits)
            byte = among[int(random_.random() * len(among))]
            if byte == END:
                return text.decode()
            matcher.consume_token(byte)
            text.append(byte)
            place = place and place.after(_Bytes.tokens[byte])
        return None


def _problem(matcher: LLMatcher) -> str | None:
    """What the engine says of the grammar; None: it takes it."""
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error() if matcher.is_error() else None


def _bits(values: Iterable[int]) -> int:
    return sum(1 << value for value in values)


_EVERY = (1 << END + 1) - 1
_ENDING = _bits((*CLOSING, END))
_TURNING = _bits(TURNING)
_ALONE = frozenset(1 << value for value in range(END))


@lru_cache(4_096)
def _set_in(bits: int) -> tuple[int, ...]:
    return tuple(at for at in range(bits.bit_length()) if bits >> at & 1)


def _start_of(name: str) -> str:
    return json.dumps(name, ensure_ascii=False) + ": "


def _plain(value: float) -> str:
    """The number without an exponent and without zeros behind the point."""
    digits = format(Decimal(repr(value)), "f")
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _is_unsatisfiable(message: str) -> bool:
    return "no finite value is valid" in message or "no valid value" in message


def suites(data: Path) -> int:
    print(
        "| suite | tests | right | refused by pointer | refused by the engine | valid, not allowed | invalid, allowed |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    wrong = 0
    for draft in DRAFTS:
        counts: Counter[str] = Counter()
        for path in sorted((data / "jsonschema-test-suite" / "tests" / draft).glob("*.json")):
            for group in json.loads(path.read_bytes()):
                _count_group(group, path.stem, draft, counts)
        total = counts["tests"]
        right = f"{counts['right']} ({counts['right'] / total:.1%})"
        kinds = ("pointer", "engine", "rejected", "wrong")
        print(f"| {draft} | {total} | {right} | " + " | ".join(str(counts[kind]) for kind in kinds) + " |", flush=True)
        wrong += counts["wrong"]
    return wrong


def _count_group(group: dict[str, Any], file: str, draft: str, counts: Counter[str]) -> None:
    tests = group["tests"]
    counts["tests"] += len(tests)
    schema = group["schema"]
    if draft == "draft7" and isinstance(schema, dict):
        schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    try:
        masks = Masks(schema)
    except Refused as refusal:
        is_right = refusal.by == "unsatisfiable" and not any(test["valid"] for test in tests)
        kind = "right" if is_right else "pointer" if refusal.by == "unsatisfiable" else refusal.by
        counts[kind] += len(tests)
        if kind != "right":
            _tell("refused", f"{draft}/{file}: {group['description']}: {refusal}")
        return
    for test in tests:
        is_allowed = masks.allow(test["data"])
        kind = "right" if is_allowed == test["valid"] else "wrong" if is_allowed else "rejected"
        counts[kind] += 1
        if kind != "right":
            _tell(kind, f"{draft}/{file}: {group['description']}: {test['description']}")


def _real(data: Path, every: int) -> Iterator[dict[str, Any]]:
    number = 0
    for path in sorted((data / "jsonschema-maskbench").glob("*.jsonl.gz")):
        with gzip.open(path) as lines:
            for line in lines:
                number += 1
                if number % every == 0:
                    yield json.loads(line)


def real(data: Path, every: int) -> int:
    counts: Counter[str] = Counter()
    times: dict[str, list[float]] = {"normalise": [], "compile": []}
    for entry in _real(data, every):
        counts["schemas"] += 1
        try:
            masks = Masks(entry["schema"])
            validator = Validator(entry["schema"])
        except Refused as refusal:
            counts[refusal.by] += 1
            _tell("refused", f"{entry['id']}: {refusal}")
            continue
        times["normalise"].append(masks.normalise_s)
        times["compile"].append(masks.compile_s)
        kinds = [_instance(masks, validator, test, entry["id"]) for test in entry["tests"]]
        counts.update(kinds)
        counts["all right"] += not {"rejected", "wrong"} & set(kinds)
    total = counts["schemas"]
    print(f"{total} real schemas, {counts['right'] + counts['rejected'] + counts['wrong']} instances")
    print(f"accepted, all instances right: {counts['all right']} ({counts['all right'] / total:.1%})")
    print(f"refused by pointer: {counts['pointer'] + counts['unsatisfiable']}, by the engine: {counts['engine']}")
    print(f"valid instances not allowed: {counts['rejected']}, invalid ones allowed: {counts['wrong']}")
    for name, seconds in times.items():
        seconds.sort()
        points = [seconds[min(int(len(seconds) * share), len(seconds) - 1)] * 1e3 for share in (0.5, 0.9, 0.99, 1)]
        print(f"{name}, ms, p50 p90 p99 most: " + " ".join(f"{point:.1f}" for point in points))
    return counts["wrong"]


def _instance(masks: Masks, validator: Validator, test: dict[str, Any], name: str) -> str:
    """The validator decides, because the labels of a few instances hinge on formats that are annotations here."""
    is_valid = validator.errors(json.dumps(test["data"])) is None
    is_allowed = masks.allow(test["data"])
    if is_valid and not is_allowed and not test["valid"]:
        return "right"  # the label and the validator differ: a format that masks enforce and the validator does not
    kind = "right" if is_valid == is_allowed else "wrong" if is_allowed else "rejected"
    if kind != "right":
        _tell(kind, f"{name}: {test['description']}")
    return kind


def walks(data: Path, most: int, seconds: float, seed: int, part: int, parts: int) -> int:
    """Random answers, as many of each schema as of all others. Those of a schema depend on ``seed`` alone."""
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    schemas = [entry["schema"] for entry in _real(data, 1)]
    for draft in DRAFTS:
        for path in sorted((data / "jsonschema-test-suite" / "tests" / draft).glob("*.json")):
            schemas.extend(group["schema"] for group in json.loads(path.read_bytes()))
    order = list(range(len(schemas)))
    random.Random(seed).shuffle(order)
    most //= parts
    order = order[part::parts]
    for done, number in enumerate(order):
        if time.monotonic() > end:
            break
        each = -(-(most - counts["walks"]) // (len(order) - done))  # what refused schemas leave is shared out
        _walk_each(schemas[number], random.Random(f"{seed} {number}"), each, counts)
        if done % 200 == 0:
            print(f"{done} of {len(order)} schemas: {dict(counts)}", file=sys.stderr, flush=True)
    print(f"{counts['walks']} random walks under {counts['schemas']} schemas: {counts['unfinished']} without an end,")
    print(f"{counts['wrong']} invalid, {counts['repeats a name']} with a name twice in one object")
    return counts["wrong"] + counts["repeats a name"]


def _walk_each(schema: Any, random_: random.Random, each: int, counts: Counter[str]) -> None:
    try:
        masks, validator = Masks(schema), Validator(schema)
    except Refused:
        counts["refused"] += 1
        return
    counts["schemas"] += 1
    start = time.monotonic()
    for _ in range(each):
        text = masks.walk(random_)
        counts["walks"] += 1
        problem = None if text is None else validator.errors(text)
        counts["unfinished"] += text is None
        if problem is not None:
            kind = "repeats a name" if "same key twice" in problem else "wrong"
            counts[kind] += 1
            _tell(kind, f"{problem}: {text} under {json.dumps(schema)[:2_000]}")
        if time.monotonic() - start > LONGEST_OF_ONE_S:
            break


class _Details:
    """A file for one line per refusal, loss and defect."""

    path: Path | None = None


def _tell(kind: str, line: str) -> None:
    if _Details.path is not None:
        with _Details.path.open("a", encoding="utf-8") as file:
            file.write(f"{kind}\t{line}\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.schemas", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="*", default=["suites", "real", "walks"], metavar="suites|real|walks")
    parser.add_argument("--data", type=Path, default=os.environ.get("INFERD_BENCH_DATA", "../shared/data"))
    parser.add_argument("--every", type=int, default=1, help="only every so many of the real schemas")
    parser.add_argument("--walks", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=600.0, help="at most this long for the walks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", metavar="N/OF", help="one part of the walks, for several processes")
    parser.add_argument("--details", type=Path, help="a file for one line per refusal, loss and defect")
    chosen = parser.parse_args()
    _Details.path = chosen.details
    data = Path(chosen.data)
    wrong = 0
    if "suites" in chosen.tables:
        wrong += suites(data)
    if "real" in chosen.tables:
        wrong += real(data, chosen.every)
    if "walks" in chosen.tables:
        wrong += walks(data, chosen.walks, chosen.seconds, chosen.seed, *map(int, chosen.part.split("/")))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
