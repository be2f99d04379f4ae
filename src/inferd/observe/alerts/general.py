"""The alerts that need no objective: the same for every server."""

from __future__ import annotations

from typing import Final

from inferd.errors import CLIENT_ERRORS
from inferd.observe.alerts import cohorts
from inferd.observe.alerts.rule import Alert

_OF_SERVER: Final = f'kind!~"{"|".join(CLIENT_ERRORS)}"'
PROBES: Final = "/health|/ping|/readyz|.*/ready"
"""Routes that answer 503 while a model loads, as a regular expression."""

_NO_PROBE: Final = f'route!~"{PROBES}"'
_REPLICA: Final = "Replica {{ $labels.replica }} of {{ $labels.model }} on {{ $labels.instance }}"

GENERAL: Final[tuple[Alert, ...]] = (
    # -- clients get errors
    Alert(
        "InferdAbsent",
        "page",
        "absent(inferd_build_info)",
        "No inferd server is scraped",
        "Prometheus has had no page of metrics from any server for five minutes. All other alerts are blind.",
        for_="5m",
    ),
    Alert(
        "InferdNotReady",
        "page",
        # Not a model that was unloaded, or is loaded on demand: it has no replica in any other state.
        'sum by (model) (inferd_replica_state{state="ready"}) == 0\n'
        'and\nsum by (model) (inferd_replica_state{state!="stopped"}) > 0',
        "{{ $labels.model }} has no ready replica",
        "Requests for {{ $labels.model }} wait or are refused, because none of its replicas is ready.",
        for_="1m",
    ),
    Alert(
        "InferdErrors",
        "page",
        f"sum by (model) (rate(inferd_errors_total{{{_OF_SERVER}}}[5m]))\n"
        "  / sum by (model) (rate(inferd_requests_total[5m])) > 0.01\n"
        f"and\nsum by (model) (increase(inferd_errors_total{{{_OF_SERVER}}}[5m])) >= 5",
        "{{ $labels.model }} fails {{ $value | humanizePercentage }} of its requests",
        "More than 1 % of the requests for {{ $labels.model }} failed in the last five minutes, and at least five of "
        "them. Errors of clients do not count.",
        for_="5m",
    ),
    Alert(
        "InferdHttpErrors",
        "ticket",
        f'sum by (instance) (rate(inferd_http_requests_total{{status=~"5..",{_NO_PROBE}}}[10m]))\n'
        f"  / sum by (instance) (rate(inferd_http_requests_total{{{_NO_PROBE}}}[10m])) > 0.05\n"
        f'and\nsum by (instance) (increase(inferd_http_requests_total{{status=~"5..",{_NO_PROBE}}}[10m])) >= 10',
        "{{ $labels.instance }} answers {{ $value | humanizePercentage }} of its requests with a status of 5xx",
        "More than 5 % of all HTTP requests to {{ $labels.instance }} got a status of 5xx in the last ten minutes. "
        "Refusals (503) and errors before a model is reached are among them.",
        for_="5m",
    ),
    Alert(
        "InferdConnectionsRefused",
        "ticket",
        "increase(inferd_http_connections_refused_total[5m]) > 0",
        "{{ $labels.instance }} refuses connections",
        "{{ $labels.instance }} has server.max_connections open connections and refuses new ones with 503.",
        for_="5m",
    ),
    # -- more work than capacity
    Alert(
        "InferdQueueFull",
        "ticket",
        'sum by (model) (increase(inferd_refused_total{reason=~"queue_full|tenant_queue_full"}[5m])) > 0',
        "The queue of {{ $labels.model }} is full",
        "Requests for {{ $labels.model }} were refused with 503 in the last five minutes, because its queue, or the "
        "share of a tenant in it, was full.",
    ),
    Alert(
        "InferdQueueGrowing",
        "ticket",
        "min_over_time(inferd_queue_waiting[10m]) > 10\n"
        "and\nderiv(inferd_queue_waiting[10m]) * 600 > 0.2 * avg_over_time(inferd_queue_waiting[10m])",
        "The queue of {{ $labels.model }} does not drain",
        "At least {{ $value }} requests for {{ $labels.model }} have waited at any time of the last ten minutes, and "
        "the queue grew by more than a fifth.",
        for_="5m",
    ),
    Alert(
        "InferdKvPressure",
        "ticket",
        "inferd_kv_usage_ratio > 0.85 and rate(inferd_preemptions_total[5m]) > 0",
        "The KV cache of {{ $labels.model }} is full",
        _REPLICA + " has {{ $value | humanizePercentage }} of its KV blocks in use and preempts sequences.",
        for_="5m",
    ),
    Alert(
        "InferdKvSaturated",
        "ticket",
        "avg_over_time(inferd_kv_usage_ratio[5m]) > 0.9 and avg_over_time(inferd_replica_waiting[5m]) >= 1",
        "Requests for {{ $labels.model }} wait for KV blocks",
        _REPLICA + " had {{ $value | humanizePercentage }} of its KV blocks in use in the mean of five minutes, while "
        "sequences waited in it.",
        for_="5m",
    ),
    *cohorts.ALERTS,
    Alert(
        "InferdRetriesRefused",
        "ticket",
        'sum by (model) (increase(inferd_retries_total{result="refused"}[5m])) > 0',
        "The retry budget of {{ $labels.model }} is used up",
        "Failed requests for {{ $labels.model }} are not tried again, because retries are already retry.budget of its "
        "traffic.",
        for_="5m",
    ),
    Alert(
        "InferdQuota",
        "ticket",
        'sum by (model) (rate(inferd_refused_total{reason=~"quota_.*"}[15m])) > 1',
        "Quotas refuse requests for {{ $labels.model }}",
        "{{ $value | humanize }} requests per second for {{ $labels.model }} are refused with 429 by the limits of "
        "their tenant or key.",
        for_="15m",
    ),
    # -- memory
    Alert(
        "InferdMemoryHigh",
        "ticket",
        "1 - inferd_memory_available_bytes / inferd_memory_limit_bytes > 0.85",
        "Memory of {{ $labels.instance }} is {{ $value | humanizePercentage }} full",
        "More than 85 % of the memory of the machine, or of the limit of its container, is in use. The kernel kills a "
        "worker when none is left.",
        for_="10m",
    ),
    Alert(
        "InferdGpuMemoryHigh",
        "ticket",
        "inferd_gpu_memory_used_bytes / inferd_gpu_memory_total_bytes > 0.95",
        "Memory of GPU {{ $labels.gpu }} is {{ $value | humanizePercentage }} full",
        "GPU {{ $labels.gpu }} of {{ $labels.instance }} has less than 5 % of its memory left. A larger batch, or "
        "another process, may exceed it.",
        for_="10m",
    ),
    # -- devices
    Alert(
        "InferdDeviceBusy",
        "ticket",
        'avg_over_time(inferd_device_duty_cycle{kind="gpu"}[15m]) > 0.9',
        "{{ $labels.device }} of {{ $labels.instance }} computes {{ $value | humanizePercentage }} of the time",
        "{{ $labels.device }} has no reserve: its duty cycle is above 90 % in the mean of fifteen minutes. More "
        "requests will wait. Add a replica on another device.",
        for_="15m",
    ),
    Alert(
        "InferdDeviceUnderused",
        "ticket",
        'avg_over_time(inferd_device_duty_cycle{kind="gpu"}[30m]) < 0.7\n'
        "and on (instance)\nsum by (instance) (avg_over_time(inferd_in_flight[30m])) >= 1",
        "{{ $labels.device }} of {{ $labels.instance }} computes only {{ $value | humanizePercentage }} of the time",
        "{{ $labels.device }} has a duty cycle below 70 % in the mean of half an hour, although requests were there "
        "all the time. It waits for the host, or there is more hardware than work.",
        for_="30m",
    ),
    Alert(
        "InferdDeviceThrottled",
        "ticket",
        'rate(inferd_device_throttled_seconds_total{reason!="power"}[5m]) > 0.1',
        "{{ $labels.device }} of {{ $labels.instance }} is slowed down ({{ $labels.reason }})",
        "{{ $labels.device }} ran at a reduced speed for {{ $value | humanizePercentage }} of the last five minutes; "
        "the reason is {{ $labels.reason }}.",
        for_="5m",
    ),
    Alert(
        "InferdDeviceHot",
        "ticket",
        'inferd_device_temperature_celsius{kind="gpu"} > 85\nor\ninferd_device_temperature_celsius{kind!="gpu"} > 95',
        "{{ $labels.device }} of {{ $labels.instance }} has {{ $value | humanize }} °C",
        "{{ $labels.device }} is close to the temperature at which it slows down or switches off.",
        for_="5m",
    ),
    Alert(
        "InferdDeviceErrors",
        "ticket",
        'increase(inferd_device_errors_total{error="uncorrected"}[1h]) > 0',
        "The memory of {{ $labels.device }} of {{ $labels.instance }} has errors",
        "{{ $labels.device }} had {{ $value | humanize }} errors in an hour that it could not correct. Results that "
        "used that memory may be wrong.",
    ),
    Alert(
        "InferdDeviceUnreadable",
        "ticket",
        "increase(inferd_device_read_failures_total[10m]) > 3",
        "Devices of {{ $labels.instance }} cannot be read ({{ $labels.source }})",
        "{{ $value | humanize }} readings of {{ $labels.source }} failed or took too long in ten minutes. Its devices "
        "have no series, and their alerts are blind.",
        for_="5m",
    ),
    # -- replicas
    Alert(
        "InferdReplicaRestarting",
        "ticket",
        "increase(inferd_replica_restarts_total[15m]) > 2",
        "A worker of {{ $labels.model }} dies again and again",
        _REPLICA + " was started {{ $value | humanize }} times in fifteen minutes.",
    ),
    Alert(
        "InferdReplicaAway",
        "ticket",
        'inferd_replica_state{state=~"hung|died|failed"} == 1',
        "A replica of {{ $labels.model }} does not come back",
        _REPLICA + ' has been in the state "{{ $labels.state }}" for five minutes.',
        for_="5m",
    ),
    Alert(
        "InferdBreakerOpen",
        "ticket",
        'inferd_breaker_state{state="open"} == 1',
        "A breaker of {{ $labels.model }} is open",
        _REPLICA + " failed several times in a row and gets no requests.",
        for_="1m",
    ),
    Alert(
        "InferdReplicaEjected",
        "ticket",
        'inferd_breaker_state{state="ejected"} == 1',
        "A replica of {{ $labels.model }} is too slow",
        _REPLICA + " is much slower than the others and gets no requests.",
        for_="5m",
    ),
    Alert(
        "InferdDrift",
        "ticket",
        "max by (model, stream) (inferd_drift_detected) == 1",
        "{{ $labels.stream }} of {{ $labels.model }} has drifted",
        "The requests or answers of {{ $labels.model }} differ from its reference by more than chance: "
        "{{ $labels.stream }}.",
    ),
    # -- what the server depends on
    Alert(
        "InferdStateUnavailable",
        "page",
        "inferd_state_available == 0",
        "The database of {{ $labels.instance }} does not answer",
        "Known keys and quotas continue from memory. No key can be made or revoked, and a restarted server knows none.",
        for_="1m",
    ),
    Alert(
        "InferdCacheErrors",
        "ticket",
        'sum by (instance) (increase(inferd_response_cache_total{result="error"}[15m])) > 0',
        "The server of the response cache fails",
        "{{ $labels.instance }} could not use its response cache. Requests are computed instead.",
    ),
    Alert(
        "InferdReloadRefused",
        "ticket",
        "inferd_config_last_reload_successful == 0",
        "{{ $labels.instance }} does not serve its configuration file",
        "The last change of the configuration file was refused, or some of its models did not load. The server "
        "continues with what it had.",
        for_="1m",
    ),
    Alert(
        "InferdGatewaysDiffer",
        "ticket",
        "inferd_gateways_differing > 0",
        "{{ $value }} gateways serve with other settings than {{ $labels.instance }}",
        "Gateways that share one database have different settings, so an answer depends on the gateway that a request "
        "reaches. inferd status names the settings.",
        for_="5m",
    ),
    # -- observation itself
    Alert(
        "InferdLogLost",
        "ticket",
        "increase(inferd_log_lines_dropped_total[15m]) > 0",
        "{{ $labels.instance }} drops log lines",
        "The reader of the log does not keep up: {{ $value | humanize }} lines were dropped in fifteen minutes.",
    ),
    Alert(
        "InferdObserverDefect",
        "ticket",
        "increase(inferd_observer_failures_total[15m]) > 0",
        "{{ $labels.instance }} could not count an event",
        "A defect in the observer lost {{ $value | humanize }} events in fifteen minutes. Requests are not affected.",
    ),
)
