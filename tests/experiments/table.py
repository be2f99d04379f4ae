"""Every row of the table, wherever its program is; run as a script it prints docs/experiments.md."""

from __future__ import annotations

import sys

# Importing them enters their rows into the table.
from tests.experiments import clients, engines, lifecycle, overload, security, state, upstreams  # noqa: F401
from tests.experiments.catalogue import EXPERIMENTS, Elsewhere, Experiment

ELSEWHERE: tuple[Elsewhere, ...] = (
    Elsewhere(
        "F11",
        "a worker is killed again and again",
        "no process, descriptor, thread or task is left behind",
        ("tests/worker/test_supervisor.py::test_many_restarts_leave_no_process_descriptor_thread_or_task_behind",),
        "tests/worker/test_supervisor.py::test_the_check_for_leaks_sees_one",
    ),
    Elsewhere(
        "F16",
        "the kernel kills a worker for its memory, which is SIGKILL",
        "as F01",
        ("F01",),
        "F01",
    ),
    Elsewhere(
        "F60b",
        "a deadline passes in the engine",
        "the request ends there and its blocks are free",
        ("tests/engine/test_engine.py::test_a_deadline_ends_a_request_in_the_engine",),
        "F60",
    ),
)

FAULTS = (
    *(f"F{number:02}" for number in (*range(1, 28), 29, 30, 31)),
    *(f"F{number}" for number in (*range(34, 43), 44, 45, 46, 47, 54, 55, *range(58, 64))),
)
SECURITY = tuple(f"SEC-{number:02}" for number in (1, 2, 5, 6, 7, 11, *range(14, 26), 29, 30))
"""What the table must have. Other items belong to what this server does not have yet."""

HEAD = """\
# Experiments

What is done to whole servers on purpose, what must hold, and the defect with which the check was seen to fail. Each runs
twice: as it is, and with the defect. `make soak` runs all of them; those marked *everyday* run with `make test` as well, without the defect.
After each one the books must balance: blocks, queues, descriptors, threads, children, outcomes, usage, golden answers,
health, and no traceback without a metric (`tests/experiments/books.py`). What each fault looks like to an operator is on
the page of [failure modes](failure-modes.md); what is defended how, on that of [security](security.md).

This page is generated from `tests/experiments/`.

| | injected | must hold | the check fails with | run |
| --- | --- | --- | --- | --- |
"""


def rows() -> list[Experiment | Elsewhere]:
    """Faults first, in the order of their numbers."""
    return sorted((*EXPERIMENTS.values(), *ELSEWHERE), key=lambda row: (row.id.startswith("SEC"), row.id))


def line(row: Experiment | Elsewhere) -> str:
    if isinstance(row, Experiment):
        control, run = row.control, "everyday" if row.is_quick else "soak"
    else:
        control = row.control if "::" not in row.control else f"`{row.control}`"
        run = "<br>".join(test if "::" not in test else f"`{test}`" for test in row.tests)
    cells = (row.id, row.injects, row.holds, control, run)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def page() -> str:
    return HEAD + "".join(map(line, rows()))


if __name__ == "__main__":
    sys.stdout.write(page())
