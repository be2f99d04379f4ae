"""Alerts for a slow part of a model's answers, which the mean of all answers hides.

A cohort is the answers of one model that one replica of one server gave. Its peers are the model's other cohorts at all
servers. The time per output token (TPOT) of a cohort is compared with that of its peers, not with a limit, so that the
alert fits every model. Inside one cohort the slowest answers are compared with the median.

The length of the prompt makes no cohort: a longer context costs more per token on a healthy server, so its answers
would differ from their peers all the time. Streamed and whole answers make none either: the time is measured in the
replica, where they are the same. A slow part of either kind is found inside the cohort of its replica. Each further
label would also multiply the series of the largest histogram.
"""

from __future__ import annotations

from typing import Final

from inferd.observe import metrics as m
from inferd.observe.alerts.rule import Alert, Recording

COHORT: Final = ("instance", "model", "replica")
MIN_ANSWERS: Final = 20
"""Answers of a cohort in ten minutes below which it is not judged."""

_NAME: Final = m.PER_OUTPUT_TOKEN_S.name
_BY: Final = f"sum by ({', '.join(COHORT)})"
_ALL: Final = "group_left () sum by (model)"
_SECONDS: Final = "instance_model_replica:inferd_tpot_seconds:increase10m"
_ANSWERS: Final = "instance_model_replica:inferd_tpot_answers:increase10m"
_MEAN: Final = "instance_model_replica:inferd_tpot_seconds:mean10m"
_PEERS: Final = "instance_model_replica:inferd_tpot_seconds:mean10m_of_peers"
_MEDIAN: Final = "instance_model_replica:inferd_tpot_seconds:p50_10m"
_SLOWEST: Final = "instance_model_replica:inferd_tpot_seconds:p95_10m"

RECORDINGS: Final = (
    Recording(_SECONDS, f"{_BY} (increase({_NAME}_sum[10m]))"),
    Recording(_ANSWERS, f"{_BY} (increase({_NAME}_count[10m]))"),
    Recording(_MEAN, f"{_SECONDS} / ({_ANSWERS} > 0)"),
    Recording(
        _PEERS,
        f"(-{_SECONDS} + on (model) {_ALL} ({_SECONDS}))\n"
        f"  / ((-{_ANSWERS} + on (model) {_ALL} ({_ANSWERS})) >= {MIN_ANSWERS})",
    ),
    *(
        Recording(name, f"histogram_quantile({q}, sum by ({', '.join(COHORT)}, le) (rate({_NAME}_bucket[10m])))")
        for name, q in ((_MEDIAN, "0.5"), (_SLOWEST, "0.95"))
    ),
)

_REPLICA: Final = "Replica {{ $labels.replica }} of {{ $labels.model }} on {{ $labels.instance }}"

ALERTS: Final = (
    Alert(
        "InferdTpotDeviation",
        "ticket",
        f"{_MEAN} / {_PEERS} > 1.5\nand\n{_ANSWERS} >= {MIN_ANSWERS}",
        "A replica of {{ $labels.model }} takes {{ $value | humanize }} times as long per token as the others",
        _REPLICA + " takes more than 1.5 times as long per token as the model's other replicas. The mean of all "
        "answers may look normal.",
        for_="5m",
    ),
    Alert(
        "InferdTpotSubset",
        "ticket",
        # Below 25 ms the buckets are too wide to tell the two apart.
        f"{_SLOWEST} / {_MEDIAN} > 4 and {_SLOWEST} > 0.025\nand\n{_ANSWERS} >= {MIN_ANSWERS}",
        "Some answers of {{ $labels.model }} take {{ $value | humanize }} times as long per token as the median",
        _REPLICA + " gives one of twenty answers at less than a quarter of the median's speed. The mean of all answers "
        "may look normal.",
        for_="10m",
    ),
)
