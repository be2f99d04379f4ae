"""Values of the chart: every pair of choices occurs in one of the sets (all pairs), each with what it demands."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

from tests.deploy.chart import Values, default_values, merged

_POSTGRES: Final = {"state": {"urlSecret": {"name": "inferd-state"}}, "persistence": {"enabled": False}}
_SERVED: Final = {"models": {"chat": {"source": "demo", "scaling": {"max": 1, "target": {"in_flight": 8}}}}}

CHOICES: Final[dict[str, dict[str, Mapping[str, Any]]]] = {
    "gateways": {
        "one": {},
        "one without a volume": {"persistence": {"enabled": False}},
        "one with a claim": {"persistence": {"existingClaim": "models"}},
        "three": {**_POSTGRES, "replicaCount": 3},
        "three by url": {
            "replicaCount": 3,
            "persistence": {"enabled": False, "storageClass": "fast"},
            "config": {"state": {"url": "postgresql://inferd@db/inferd"}},
        },
        "hpa": {**_POSTGRES, "autoscaling": {"mode": "hpa", "minReplicas": 3}},
        "keda": {
            **_POSTGRES,
            "config": _SERVED,
            "autoscaling": {"mode": "keda", "keda": {"model": "chat", "target": "2.5"}},
        },
        "keda without a key": {
            **_POSTGRES,
            "config": {**_SERVED, "server": {"auth": "off"}},
            "autoscaling": {"mode": "keda", "keda": {"model": "chat", "metric": "waiting", "keyEnv": ""}},
        },
    },
    "tls": {"off": {}, "on": {"tls": {"existingSecret": "inferd-tls"}}},
    "stop": {
        "default": {},
        "long": {"preStopSeconds": 0, "config": {"server": {"drain_delay_s": 0.5, "grace_s": 599.5}}},
    },
    "observed": {
        "no": {},
        "yes": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
        "with a key": {"serviceMonitor": {"enabled": True, "keySecret": {"name": "inferd-metrics"}}},
    },
    "network": {
        "open": {},
        "namespace": {"networkPolicy": {"enabled": True}},
        "named": {
            "networkPolicy": {
                "enabled": True,
                "from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}],
                "egress": [{"ports": [{"port": 5432}], "to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
            }
        },
    },
    "place": {
        "anywhere": {},
        "gpu": {
            "topologySpread": False,
            "runtimeClassName": "nvidia",
            "priorityClassName": "serving",
            "nodeSelector": {"gpu": "true"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {"podAntiAffinity": {}},
            "resources": {"limits": {"nvidia.com/gpu": "1"}, "requests": None},
        },
    },
    "extras": {
        "none": {},
        "all": {
            "existingSecret": "inferd-secrets",
            "extraEnv": [{"name": "INFERD_SERVER__LOG_LEVEL", "value": "debug"}],
            "extraVolumes": [{"name": "models", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
            "imagePullSecrets": [{"name": "registry"}],
            "image": {"repository": "registry.example.com/inferd", "tag": "cuda", "pullPolicy": "Always"},
            "podAnnotations": {"a/b": "c"},
            "podLabels": {"team": "a"},
            "restartOnConfigChange": True,
            "service": {"type": "LoadBalancer", "annotations": {"a/b": "c"}},
            "serviceAccount": {"annotations": {"a/b": "c"}},
            "fullnameOverride": "chat-server",
        },
        "no grpc": {"config": {"server": {"grpc_port": None, "max_body_bytes": 33554432}}},
        "no budget": {"podDisruptionBudget": {"enabled": False}, "resources": {"limits": None, "requests": None}},
    },
}


def all_pairs() -> list[dict[str, str]]:
    """Sets of choices in which every allowed pair of two dimensions occurs; greedy, and the same each time."""
    names = list(CHOICES)
    missing = {
        ((one, a), (two, b))
        for one, two in itertools.combinations(names, 2)
        for a in CHOICES[one]
        for b in CHOICES[two]
        if is_allowed({one: a, two: b})
    }
    found = []
    while missing:
        chosen: dict[str, str] = dict(min(missing))
        for name in names:
            if name not in chosen:
                candidates = [option for option in CHOICES[name] if is_allowed({**chosen, name: option})]
                gains = {option: _gain({**chosen, name: option}, missing) for option in candidates}
                chosen[name] = max(gains, key=lambda option: gains[option])
        missing -= _pairs(chosen)
        found.append({name: chosen[name] for name in names})
    return found


def is_allowed(chosen: Mapping[str, str]) -> bool:
    """KEDA needs the gRPC port."""
    return not (chosen.get("gateways", "").startswith("keda") and chosen.get("extras") == "no grpc")


def _pairs(chosen: Mapping[str, str]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    ordered = [(name, chosen[name]) for name in CHOICES if name in chosen]
    return set(itertools.combinations(ordered, 2))


def _gain(chosen: Mapping[str, str], missing: set[tuple[tuple[str, str], tuple[str, str]]]) -> int:
    return len(_pairs(chosen) & missing)


def overrides_of(chosen: Mapping[str, str]) -> dict[str, Any]:
    """What a user's file of values has."""
    result: dict[str, Any] = {}
    for name, option in chosen.items():
        result = _joined(result, CHOICES[name][option])
    return result


def values_of(chosen: Mapping[str, str]) -> Values:
    return merged(default_values(), overrides_of(chosen))


def _joined(one: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(one)
    for key, value in other.items():
        known = result.get(key)
        result[key] = _joined(known, value) if isinstance(known, dict) and isinstance(value, Mapping) else value
    return result
