"""A run as Kubernetes objects: plain values, which `render` writes as YAML. No operator, no gang, nothing but pods.

The controller's pod knows who is there; attention and expert nodes are pods of StatefulSets, which join it and may
come, go and come back in any order; gateways serve HTTP. Secrets are named here and never written.
"""

from typing import Any

from afserve.launch.render.layout import HTTP_PORT, NODES_PORT, ClusterLayout, NodePool
from afserve.launch.render.objects import (
    CERTIFICATES,
    KEYS,
    RUN,
    KubernetesSettings,
    Object,
    an_object,
    budget,
    container,
    joining,
    policy,
    port,
    probe,
    service,
    spread,
    template,
    trust,
    who,
)
from afserve.member import Role

_DRAIN = 30  # seconds that answers have when a gateway goes
_GONE = 5  # until nobody sends a gateway new connections
_PER_GATEWAY = 64  # running sequences, on the average


def manifests(layout: ClusterLayout, asked: KubernetesSettings) -> dict[str, list[Object]]:
    """Objects by the file that they belong in."""
    pools = {f"{pool.role}.yaml": _pool(layout, asked, pool) for pool in layout.pools}
    files = {
        "namespace.yaml": [_namespace(asked)],
        "controller.yaml": _controller(layout, asked),
        **pools,
        "gateway.yaml": _gateways(layout, asked),
        "network.yaml": _network(asked, [pool.role for pool in layout.pools]),
    }
    return {**files, "kustomization.yaml": [_kustomization(layout, asked, list(files))]}


def _namespace(asked: KubernetesSettings) -> Object:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": asked.namespace, "labels": labels}}


def _controller(layout: ClusterLayout, asked: KubernetesSettings) -> list[Object]:
    words = layout.up(f"$(POD_IP):{NODES_PORT}", "--token-file", f"{RUN}/token", *trust(layout))
    words += ["--node-memory", str(layout.sizes.memory), "--host", "0.0.0.0", "--port", str(HTTP_PORT)]  # noqa: S104
    words += ["--api-key-file", f"{RUN}/api.key", "--admin-key-file", f"{RUN}/admin.key"]
    box = container(layout, asked, "controller", words, {"cpu": "2", "memory": "4Gi"})
    box["ports"] = [
        {"name": "nodes", "containerPort": NODES_PORT},
        {"name": "http", "containerPort": HTTP_PORT},
    ]
    box["livenessProbe"] = probe("/health", 30)
    box["readinessProbe"] = probe("/health", 6)
    box["startupProbe"] = probe("/health", 60)
    spec = {"replicas": 1, "strategy": {"type": "Recreate"}, **template(layout, asked, "controller", box)}
    ports = [port("nodes", NODES_PORT, NODES_PORT), port("http", HTTP_PORT, HTTP_PORT)]
    return [
        an_object("apps/v1", "Deployment", asked, "controller", spec),
        service(asked, "controller", "controller", ports, early=True),
    ]


def _pool(layout: ClusterLayout, asked: KubernetesSettings, pool: NodePool) -> list[Object]:
    name = str(pool.role)
    words = ["node", "--role", name, *joining(layout)]
    sizes: dict[str, Any] = {"cpu": str(layout.sizes.cpus), "memory": f"{layout.sizes.memory}Gi"}
    box = container(layout, asked, name, words, sizes, gpus=0 if pool.on_cpu else 1)
    pods = template(layout, asked, name, box)
    pods["template"]["spec"]["nodeSelector"] = asked.selector(pool)
    pods["template"]["spec"]["topologySpreadConstraints"] = [spread(asked, name)]
    spec = {"replicas": pool.nodes, "serviceName": name, "podManagementPolicy": "Parallel", **pods}
    return [
        an_object("apps/v1", "StatefulSet", asked, name, spec),
        service(asked, name, name, [], headless=True),
        budget(asked, name),
    ]


def _gateways(layout: ClusterLayout, asked: KubernetesSettings) -> list[Object]:
    words = ["node", "--role", "gateway", *joining(layout), "--host", "0.0.0.0", "--port", str(HTTP_PORT)]  # noqa: S104
    words += ["--drain-seconds", str(_DRAIN), "--api-key-file", f"{RUN}/api.key"]
    words += ["--admin-key-file", f"{RUN}/admin.key"]
    box = container(layout, asked, "gateway", words, {"cpu": "1", "memory": "2Gi"})
    box["ports"] = [{"name": "http", "containerPort": HTTP_PORT}]
    box["livenessProbe"] = probe("/health", 6)
    box["readinessProbe"] = probe("/ready", 2)
    box["startupProbe"] = probe("/health", 120)
    box["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(_GONE)]}}}
    pods = template(layout, asked, "gateway", box)
    pods["template"]["spec"]["terminationGracePeriodSeconds"] = _GONE + _DRAIN + 10
    spec = {"replicas": asked.gateways, **pods}
    scaled = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "gateway"}
    metric = {
        "type": "Object",
        "object": {
            "describedObject": {"apiVersion": "v1", "kind": "Service", "name": "afserve"},
            "metric": {"name": "afserve_num_requests_running"},
            "target": {"type": "AverageValue", "averageValue": str(_PER_GATEWAY)},
        },
    }
    limits = {"minReplicas": asked.gateways, "maxReplicas": max(asked.gateways, asked.most_gateways)}
    return [
        an_object("apps/v1", "Deployment", asked, "gateway", spec),
        service(asked, "afserve", "gateway", [port("http", 80, HTTP_PORT)]),
        an_object(
            "autoscaling/v2",
            "HorizontalPodAutoscaler",
            asked,
            "gateway",
            {"scaleTargetRef": scaled, **limits, "metrics": [metric]},
        ),
        budget(asked, "gateway"),
    ]


def _network(asked: KubernetesSettings, roles: list[Role]) -> list[Object]:
    """Nobody reaches anybody but: nodes and gateways the controller, attention nodes gateways and experts, all HTTP."""
    inside = [*map(str, roles), "gateway"]
    nodes = {"from": [who(name) for name in inside], "ports": [{"port": NODES_PORT}, {"port": HTTP_PORT}]}
    streams = {"from": [who("attention")]}
    return [
        an_object(
            "networking.k8s.io/v1",
            "NetworkPolicy",
            asked,
            "closed",
            {"podSelector": {}, "policyTypes": ["Ingress"]},
        ),
        policy(asked, "controller", [nodes, streams]),
        policy(asked, "gateway", [{"ports": [{"port": HTTP_PORT}]}, streams]),
        *([policy(asked, "expert", [streams])] if Role.EXPERT in roles else []),
    ]


def _kustomization(layout: ClusterLayout, asked: KubernetesSettings, files: list[str]) -> Object:
    """A base. Keys and certificates come from files beside it that people make and keep out of any repository."""
    keys = [f"secrets/{name}" for name in ("token", "api.key", "admin.key")]
    secrets = [{"name": KEYS, "files": keys}]
    if layout.certs:
        for name in ("controller", *(str(pool.role) for pool in layout.pools), "gateway"):
            folder = f"secrets/{name}"
            pems = [f"{folder}/authority.pem", f"{folder}/node.pem"]
            secrets.append({"name": f"{CERTIFICATES}-{name}", "files": pems})
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": asked.namespace,
        "resources": files,
        "secretGenerator": secrets,
        "generatorOptions": {"disableNameSuffixHash": True},
    }
