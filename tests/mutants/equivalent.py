"""Mutants that no test can kill: behaviour stays the same, or differs where nothing is promised. Each has its reason.

A change is named by its file and its lines before and after, without their indentation, so that moved lines do not matter.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tests.mutants.operators import Change, applied


class Equivalent(NamedTuple):
    """``before`` and ``after``: the lines that the change is on."""

    file: str
    before: str
    after: str
    reason: str


EQUIVALENT: Final = (
    Equivalent(
        "checkpoints/text/template_sandbox.py",
        "self.meter.stop()",
        "pass",
        "A template that is compiled later in the thread is folded less, and gives the same text.",
    ),
    Equivalent(
        "llm.py",
        "BarColumn(bar_width=30),",
        "BarColumn(bar_width=31),",
        "How wide a bar is drawn has no one right value.",
    ),
    Equivalent(
        "llm.py",
        'columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())',
        'columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=21), TimeElapsedColumn())',
        "How wide a bar is drawn has no one right value.",
    ),
    Equivalent(
        "predict/load.py",
        'seconds = {"runtime": round(loaded - began, 4), "warm_up": round(clock.now() - loaded, 4)}',
        'seconds = {"runtime": round(loaded - began, 5), "warm_up": round(clock.now() - loaded, 4)}',
        "To how many places a time is rounded has no one right value.",
    ),
    Equivalent(
        "predict/load.py",
        'seconds = {"runtime": round(loaded - began, 4), "warm_up": round(clock.now() - loaded, 4)}',
        'seconds = {"runtime": round(loaded - began, 4), "warm_up": round(clock.now() - loaded, 5)}',
        "To how many places a time is rounded has no one right value.",
    ),
    Equivalent(
        "errors.py",
        "super().__init__(message)",
        "pass",
        "Python's exceptions keep what they were made with before __init__ is called.",
    ),
    Equivalent(
        "observe/why/sentence.py",
        "if seconds > 0 and seconds >= LEAST_PART * case.numbers.total",
        "if seconds > 0 and seconds > (LEAST_PART * case.numbers.total)",
        "Whether a part of exactly a tenth of the time is named has no one right answer.",
    ),
    Equivalent(
        "tenancy/leases.py",
        "(self._version if version > self._version else -1, self._presence.id),",
        "(self._version if version >= self._version else -1, self._presence.id),",
        "It is read only where the two differ.",
    ),
    Equivalent(
        "checkpoints/stored/reading.py",
        "order = groups.argsort(stable=True)",
        "order = groups.argsort(stable=False)",
        "In which order the columns of one group stand changes no product.",
    ),
    Equivalent(
        "tenancy/idempotency.py",
        "if self._state is None or self._presence is None:",
        "if ((self._state is None) and (self._presence is None)):",
        "A store has both or neither: the gateway's database, and its presence in it.",
    ),
    Equivalent(
        "head_pattern.py",
        "return head[max(0, at - len(_LINE)) : at].lower() == _LINE and digits.isdigit() and len(digits) <= MAX_DIGITS",
        "return head[max(1, at - len(_LINE)) : at].lower() == _LINE and digits.isdigit() and len(digits) <= MAX_DIGITS",
        "A head begins with a method, never with the line of its length.",
    ),
    Equivalent(
        "registry/content.py",
        r'if size > 8 and struct.unpack("<Q", head[:8].ljust(8, b"\0"))[0] < size and head[8:9] == b"{":',
        r'if size >= 8 and struct.unpack("<Q", head[:8].ljust(8, b"\0"))[0] < size and head[8:9] == b"{":',
        "A file of 8 bytes has no ninth.",
    ),
    Equivalent(
        "state/presence.py",
        "return not self._is_local and silent_s < TERM_S",
        "return not self._is_local and silent_s <= TERM_S",
        "The two differ at a single moment, and heartbeats come many times within the term.",
    ),
    Equivalent(
        "state/sqlite.py",
        'self._connection.execute("PRAGMA synchronous = FULL")',
        "pass",
        "It is SQLite's default, unless it was built otherwise.",
    ),
    Equivalent(
        "predict/encoder/ragged.py",
        "if length > _LONG:",
        "if (not (length > _LONG)):",
        "Both compute the same attention; which is quicker depends on the length.",
    ),
    Equivalent(
        "predict/runtimes/xgboost.py",
        r'return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", text)[:300].rstrip(".")',
        r'return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", text)[:301].rstrip(".")',
        "How much of a library's own sentence is told has no one right value.",
    ),
    Equivalent(
        "cache/key.py",
        'digest.update(len(part).to_bytes(8, "little"))',
        'digest.update(len(part).to_bytes(9, "little"))',
        "How many bytes a length has is the same for all keys of a build.",
    ),
    Equivalent(
        "app/config_file.py",
        "count, newest = count + 1, max(newest, found.st_mtime_ns)",
        "count, newest = (count - 1), max(newest, found.st_mtime_ns)",
        "The count is compared with an earlier count alone.",
    ),
    Equivalent(
        "app/root.py",
        "logger.propagate = False",
        "logger.propagate = True",
        "The root logger of the server's process has no handler.",
    ),
    Equivalent(
        "cli/running/status.py",
        "beside = width >= _WIDE",
        "beside = width > _WIDE",
        "At the width where one layout follows the other both fit.",
    ),
    Equivalent(
        "cli/terminal.py",
        "amounts: tuple[ProgressColumn, ...] = (DownloadColumn(binary_units=True), TransferSpeedColumn())",
        "amounts: tuple[ProgressColumn, ...] = (DownloadColumn(binary_units=False), TransferSpeedColumn())",
        "No page says in which units the amount of a download is shown.",
    ),
    Equivalent(
        "remote/connection.py",
        'if at > length or data[at - 2 : at] != b"\\r\\n" or is_last:',
        'if at > length or data[(at + 2) : at] != b"\\r\\n" or is_last:',
        "Chunks that are not taken at once are read by the parser, with the same result.",
    ),
    Equivalent(
        "tenancy/leases.py",
        "useless = [name for name, share in shares.items() if share * whole < max(left[name].need, 1.0) - 1e-9]",
        "useless = [name for name, share in shares.items() if (share * whole) <= (max(left[name].need, 1.0) - 1e-9)]",
        "The two differ at a single floating-point number, within a tolerance.",
    ),
    Equivalent(
        "tenancy/idempotency.py",
        '_write(transaction, claim, presence.id, StoredAnswer(0, b"", b""), wall + self._ttl_s)',
        '_write(transaction, claim, presence.id, StoredAnswer(1, b"", b""), wall + self._ttl_s)',
        "The status of an answer that is not there yet is not read.",
    ),
    Equivalent(
        "worker/process.py",
        "self.was_ended_here = False  # its channel broke, and the process did not end by itself",
        "self.was_ended_here = True  # its channel broke, and the process did not end by itself",
        "It is assigned again before the process is reported as gone, and read only afterwards.",
    ),
    Equivalent(
        "tenancy/leases.py",
        "self._version = -1",
        "self._version = -2",
        "Every version is above both.",
    ),
    Equivalent(
        "tenancy/leases.py",
        "(self._version if version > self._version else -1, self._presence.id),",
        "(self._version if version > self._version else -2, self._presence.id),",
        "Every version is above both.",
    ),
    Equivalent(
        "tenancy/leases.py",
        "with database.transaction(durable=False) as transaction:",
        "with database.transaction(durable=True) as transaction:",
        "A commit that waits for the disk changes no result.",
    ),
    Equivalent(
        "stored/store.py",
        "with database.transaction(durable=False) as transaction:",
        "with database.transaction(durable=True) as transaction:",
        "A commit that waits for the disk changes no result.",
    ),
    Equivalent(
        "tenancy/leases.py",
        "if share < bucket.share:",
        "if share <= bucket.share:",
        "A share of 0 that is released changes nothing.",
    ),
    Equivalent(
        "tenancy/leases.py",
        "if more < -NOTEWORTHY or (more < 0 and mine <= NOTEWORTHY):",
        "if more < -NOTEWORTHY or (more <= 0 and mine <= NOTEWORTHY):",
        "A share of 0 that is released changes nothing.",
    ),
    Equivalent(
        "tenancy/leases.py",
        "if more < -NOTEWORTHY or (more < 0 and mine <= NOTEWORTHY):",
        "if more < -NOTEWORTHY or (more < 0 and mine < NOTEWORTHY):",
        "Which differences are too small to be written has no one right bound.",
    ),
    Equivalent(
        "tenancy/leases.py",
        "elif more > 0 and free_share > 0:",
        "elif more >= 0 and free_share > 0:",
        "A share of 0 that is taken changes nothing.",
    ),
    Equivalent(
        "tenancy/leases.py",
        "demand = demand if demand > 1e-3 * bucket.whole / 60.0 else 0.0",
        "demand = demand if demand >= (1e-3 * bucket.whole / 60.0) else 0.0",
        "How little counts as none has no one right bound.",
    ),
    Equivalent(
        "tenancy/leases.py",
        "if len(buckets) > MANY:",
        "if (not (len(buckets) > MANY)):",
        "Both branches read the rows of the same buckets.",
    ),
    Equivalent(
        "tenancy/leases.py",
        "if len(buckets) > MANY:",
        "if len(buckets) >= MANY:",
        "Both branches read the rows of the same buckets.",
    ),
    Equivalent(
        "tenancy/limiter.py",
        "if tightest is None or bucket.level < tightest.level:",
        "if tightest is None or bucket.level <= tightest.level:",
        "Of two quotas with equally much left, either is the tightest.",
    ),
    Equivalent(
        "cache/memory.py",
        "self._by_magnitude: list[dict[bytes, None]] = [{} for _ in range(65)]",
        "self._by_magnitude: list[dict[bytes, None]] = [{} for _ in range(66)]",
        "No entry is as large as the last magnitude.",
    ),
    Equivalent(
        "cache/memory.py",
        "self._by_magnitude = [{} for _ in range(65)]",
        "self._by_magnitude = [{} for _ in range(66)]",
        "No entry is as large as the last magnitude.",
    ),
    Equivalent(
        "app/root.py",
        "if soft != resource.RLIM_INFINITY and soft < wanted:",
        "if soft != resource.RLIM_INFINITY and soft <= wanted:",
        "A limit that is set to what it is stays.",
    ),
    Equivalent(
        "state/audit.py",
        "if len(found) >= limit:",
        "if len(found) > limit:",
        "One file more is read, and the entries are cut to their number all the same.",
    ),
    Equivalent(
        "autoscale/meter.py",
        "if rate is not None and surge > rate:",
        "if rate is not None and surge >= rate:",
        "Where both are the same the rise is 0 either way.",
    ),
    Equivalent(
        "http/connection.py",
        "if size - begin <= SLICE_BYTES:",
        "if (size + begin) <= SLICE_BYTES:",
        "Into which pieces the rest of a read is cut changes no answer.",
    ),
    Equivalent(
        "http/connection.py",
        "if size <= SLICE_BYTES:",
        "if size < SLICE_BYTES:",
        "A read of this size is one piece by either way.",
    ),
    Equivalent(
        "http/connection.py",
        "if length is not None and (len(length) > 6 or not length.isdigit() or int(length) > GATHER_BYTES):",
        "if length is not None and (len(length) > 7 or not length.isdigit() or int(length) > GATHER_BYTES):",
        "Every number of seven digits is greater than GATHER_BYTES, so the length only spares the conversion.",
    ),
    Equivalent(
        "router/choosing/health.py",
        "if len(self._members) > 1:",
        "if len(self._members) >= 1:",
        "A replica without peers is compared with none, so what is noted of it changes nothing.",
    ),
    Equivalent(
        "router/choosing/health.py",
        'if member.breaker is not None and member.breaker_state != "closed":',
        'if ((member.breaker is not None) or (member.breaker_state != "closed")):',
        "A breaker that is closed takes no note, and a replica without one is always closed.",
    ),
    Equivalent(
        "http/http2/stream.py",
        "or size > connection.max_frame",
        "or size >= connection.max_frame",
        "A body of exactly one frame is the same frame by either way.",
    ),
    Equivalent(
        "observe/payloads/whole.py",
        "return isinstance(value, list) and any(_has(one, names, depth + 1) for one in value)",
        "return isinstance(value, list) and any(_has(one, names, (depth - 1)) for one in value)",
        "What is searched was walked before, and is refused where it is deeper than the bound.",
    ),
)


def reason_for(change: Change, source: str) -> str | None:
    """Why a change cannot be noticed; None: it is not among those that are known."""
    begin = source.rfind("\n", 0, change.start) + 1
    rest = len(source) - (source.find("\n", change.end) % (len(source) + 1))
    after = applied(change, source)
    lines = source[begin : len(source) - rest].strip(), after[begin : len(after) - rest].strip()
    for known in EQUIVALENT:
        if (known.file, known.before, known.after) == (change.file, *lines):
            return known.reason
    return None
