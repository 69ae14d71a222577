"""Shapes of the deployed Kubernetes objects: known keys and the types of their values.

They catch misspelt or misplaced keys, which the API server would drop or refuse. To check against Kubernetes' own
schemas, run `kubernetes-validate` as described in deploy/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# A shape is a type, a dict of known keys (required ones end in !), a list of one shape, or a mapping of strings.
TEXTS = "texts"
LABELS = {"matchLabels!": TEXTS}
META = {"name!": str, "labels": TEXTS, "annotations": TEXTS}
PROBE = {
    "httpGet!": {"path!": str, "port!": (str, int)}, "periodSeconds!": int, "timeoutSeconds!": int,
    "failureThreshold!": int,
}  # fmt: skip
CONTAINER = {
    "name!": str, "image!": str, "imagePullPolicy": str, "ports!": [{"name!": str, "containerPort!": int}],
    "env": [
        {"name!": str, "value": str, "valueFrom": {"resourceFieldRef!": {"containerName!": str, "resource!": str}}}
    ],
    "envFrom": [{"secretRef!": {"name!": str}}],
    "startupProbe!": PROBE, "readinessProbe!": PROBE, "livenessProbe!": PROBE,
    "lifecycle": {"preStop!": {"exec!": {"command!": [str]}}},
    "resources!": {"requests!": TEXTS, "limits!": TEXTS},
    "securityContext!": {
        "allowPrivilegeEscalation!": bool, "readOnlyRootFilesystem!": bool, "capabilities!": {"drop!": [str]},
    },
    "volumeMounts": [{"name!": str, "mountPath!": str}],
}  # fmt: skip
POD = {
    "enableServiceLinks": bool, "automountServiceAccountToken": bool, "terminationGracePeriodSeconds!": int,
    "securityContext!": {
        "runAsNonRoot!": bool, "runAsUser!": int, "runAsGroup!": int, "fsGroup!": int,
        "seccompProfile!": {"type!": str},
    },
    "topologySpreadConstraints": [
        {"maxSkew!": int, "topologyKey!": str, "whenUnsatisfiable!": str, "labelSelector!": LABELS}
    ],
    "containers!": [CONTAINER],
    "volumes": [{"name!": str, "emptyDir!": {"sizeLimit": str}}],
}  # fmt: skip
PEER = {
    "podSelector": {"matchLabels": TEXTS}, "namespaceSelector": LABELS,
    "ipBlock": {"cidr!": str, "except": [str]},
}  # fmt: skip
POLICY_PORTS = [{"port!": (str, int), "protocol!": str}]
SPECS = {
    ("apps/v1", "Deployment"): {
        "replicas!": int, "selector!": LABELS,
        "strategy": {"rollingUpdate!": {"maxUnavailable!": int, "maxSurge!": int}},
        "template!": {"metadata!": {"labels!": TEXTS, "annotations": TEXTS}, "spec!": POD},
    },
    ("v1", "Service"): {
        "selector!": TEXTS, "ports!": [{"name!": str, "port!": int, "targetPort!": (str, int)}],
    },
    ("policy/v1", "PodDisruptionBudget"): {"maxUnavailable!": int, "selector!": LABELS},
    ("networking.k8s.io/v1", "NetworkPolicy"): {
        "podSelector!": LABELS, "policyTypes!": [str], "ingress!": [{"from!": [PEER], "ports!": POLICY_PORTS}],
        "egress!": [{"to": [PEER], "ports!": POLICY_PORTS}],
    },
    ("monitoring.coreos.com/v1", "ServiceMonitor"): {
        "selector!": LABELS, "endpoints!": [{"port!": str, "path!": str, "interval!": str}],
    },
}  # fmt: skip


def faults(document: Any) -> list[str]:
    """Return the faults of one object as `path: fault`."""
    kind = (document.get("apiVersion"), document.get("kind"))
    if kind not in SPECS:
        return [f"no shape is known for {kind}"]
    shape = {"apiVersion!": str, "kind!": str, "metadata!": META, "spec!": SPECS[kind]}
    return list(_compare(document, shape, kind[1]))


def _compare(value: Any, shape: Any, path: str) -> Iterator[str]:
    if shape == TEXTS:
        shape = {f"{key}!": str for key in value} if isinstance(value, dict) else {}
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            yield f"{path}: a mapping is needed, not {value!r}"
            return
        known = {key.rstrip("!"): inner for key, inner in shape.items()}
        yield from (f"{path}.{key}: unknown" for key in value if key not in known)
        yield from (f"{path}.{key[:-1]}: missing" for key in shape if key.endswith("!") and key[:-1] not in value)
        for key in value.keys() & known.keys():
            yield from _compare(value[key], known[key], f"{path}.{key}")
    elif isinstance(shape, list):
        if not isinstance(value, list) or not value:
            yield f"{path}: a list is needed, not {value!r}"
            return
        for number, item in enumerate(value):
            yield from _compare(item, shape[0], f"{path}[{number}]")
    elif not isinstance(value, shape) or (isinstance(value, bool) and shape is not bool):
        yield f"{path}: {shape} is needed, not {value!r}"
