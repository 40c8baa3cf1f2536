"""The parts that Kubernetes objects of a run are made of, as plain values: pods without privilege, services, policies.

Which objects there are is said in `render_k8s` and `render_kuberay`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from afserve.launch.render.layout import HTTP_PORT, NODES_PORT, ClusterLayout, NodePool
from afserve.member import Role

Object = dict[str, Any]
USER = 10001
RUN, MODELS, CERTS = "/run/afserve", "/models", "/run/afserve-certs"
KEYS, CERTIFICATES = "afserve-keys", "afserve-certs"
LABEL = "app.kubernetes.io/name"
PART = "app.kubernetes.io/component"
WRITABLE = "/tmp"  # noqa: S108  the pod's own


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """`claim` is a PersistentVolumeClaim with checkpoints, mounted at /models; empty where the model is in the image.

    `selectors` are the node labels of each role's hosts.
    """

    image: str = "afserve:latest"
    namespace: str = "afserve"
    claim: str = ""
    gateways: int = 2
    most_gateways: int = 8
    selectors: Mapping[Role, Mapping[str, str]] = field(default_factory=dict)

    def selector(self, pool: NodePool) -> dict[str, str]:
        """By default a label with the hardware's name, for people to put on their hosts."""
        return dict(self.selectors.get(pool.role) or {"afserve.dev/hardware": pool.hardware})


def trust(layout: ClusterLayout) -> list[str]:
    return ["--certs", CERTS] if layout.certs else ["--insecure-nodes"]


def joining(layout: ClusterLayout) -> list[str]:
    return ["--join", f"controller:{NODES_PORT}", "--token-file", f"{RUN}/token", *trust(layout)]


def container(
    layout: ClusterLayout,
    asked: KubernetesSettings,
    name: str,
    words: list[str],
    sizes: dict[str, Any],
    gpus: int = 0,
) -> Object:
    mounts = [
        {"name": "keys", "mountPath": RUN, "readOnly": True},
        {"name": "scratch", "mountPath": WRITABLE},
    ]
    if layout.certs:
        mounts.append({"name": "certs", "mountPath": CERTS, "readOnly": True})
    if asked.claim:
        mounts.append({"name": "models", "mountPath": MODELS, "readOnly": True})
    taken = {**sizes, **({"nvidia.com/gpu": gpus} if gpus else {})}
    return {
        "name": name,
        "image": asked.image,
        "args": words,
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "HOME", "value": WRITABLE},
        ],
        "resources": {"requests": taken, "limits": taken},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def template(
    layout: ClusterLayout, asked: KubernetesSettings, name: str, container: Object
) -> dict[str, Any]:
    """The selector and the pods of a workload."""
    volumes: list[Object] = [
        {"name": "keys", "secret": {"secretName": KEYS, "defaultMode": 0o440}},
        {"name": "scratch", "emptyDir": {}},
    ]
    if layout.certs:
        secret = {"secretName": f"{CERTIFICATES}-{name}", "defaultMode": 0o440}
        volumes.append({"name": "certs", "secret": secret})
    if asked.claim:
        claim = {"claimName": asked.claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
    return {
        "selector": {"matchLabels": labels(name)},
        "template": {
            "metadata": {"labels": labels(name)},
            "spec": {
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": USER,
                    "runAsGroup": USER,
                    "fsGroup": USER,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [container],
                "volumes": volumes,
            },
        },
    }


def labels(name: str) -> dict[str, str]:
    return {LABEL: "afserve", PART: name}


def who(name: str) -> Object:
    return {"podSelector": {"matchLabels": labels(name)}}


def an_object(version: str, kind: str, asked: KubernetesSettings, name: str, spec: Object) -> Object:
    meta = {"name": name, "namespace": asked.namespace, "labels": labels(name)}
    return {"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec}


def policy(asked: KubernetesSettings, name: str, ingress: list[Object]) -> Object:
    spec = {**who(name), "policyTypes": ["Ingress"], "ingress": ingress}
    return an_object("networking.k8s.io/v1", "NetworkPolicy", asked, name, spec)


def budget(asked: KubernetesSettings, name: str) -> Object:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels(name)}}
    return an_object("policy/v1", "PodDisruptionBudget", asked, name, spec)


def service(
    asked: KubernetesSettings,
    name: str,
    to: str,
    ports: list[Object],
    *,
    headless: bool = False,
    early: bool = False,
) -> Object:
    """`early`: also before its pods are ready, which nodes that join must not wait for."""
    spec: Object = {"selector": labels(to)}
    if headless:
        spec["clusterIP"] = "None"
    if ports:
        spec["ports"] = ports
    if early:
        spec["publishNotReadyAddresses"] = True
    return an_object("v1", "Service", asked, name, spec)


def port(name: str, port: int, target: int) -> Object:
    return {"name": name, "port": port, "targetPort": target}


def probe(path: str, failures: int) -> Object:
    return {"httpGet": {"path": path, "port": HTTP_PORT}, "periodSeconds": 5, "failureThreshold": failures}


def spread(asked: KubernetesSettings, name: str) -> Object:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels(name)},
    }
