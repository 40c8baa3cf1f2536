"""A run as KubeRay objects: a RayJob whose cluster has a group of workers per role, and `afserve up --ray` on its head.

Each worker offers one place of its role as a resource of Ray's, so that the run's own spreading and restarts are used.
"""

from typing import Any

from afserve.launch.render.layout import HTTP_PORT, ClusterLayout, NodePool
from afserve.launch.render.objects import (
    RUN,
    KubernetesSettings,
    Object,
    container,
    policy,
    port,
    service,
    template,
    trust,
)

_HEAD = {"cpu": "2", "memory": "8Gi"}


def ray_manifests(layout: ClusterLayout, asked: KubernetesSettings) -> dict[str, list[Object]]:
    """Objects by the file that they belong in. Custom resources are KubeRay's own: `ray.io/v1`."""
    return {
        "rayjob.yaml": [_job(layout, asked)],
        "service.yaml": [service(asked, "afserve", "head", [port("http", 80, HTTP_PORT)])],
        "network.yaml": [_within(asked), policy(asked, "head", [{"ports": [{"port": HTTP_PORT}]}])],
    }


def entrypoint(layout: ClusterLayout) -> list[str]:
    """The arguments of `afserve` on the head: the nodes go where their role's resource is."""
    words = ["up", "--ray", "auto", *layout.counts(), *trust(layout)]
    for pool in layout.pools:
        flag = "--ray-attention" if pool.role == "attention" else "--ray-experts"
        words += [flag, _resources(layout, pool)]
    words += ["--host", "0.0.0.0", "--port", str(HTTP_PORT)]  # noqa: S104
    return [
        *words,
        *["--api-key-file", f"{RUN}/api.key", "--admin-key-file", f"{RUN}/admin.key"],
        *layout.extra,
    ]


def _resources(layout: ClusterLayout, pool: NodePool) -> str:
    gpu = "" if pool.on_cpu else ",GPU=1"
    return f"CPU={layout.sizes.cpus}{gpu},afserve_{pool.role}=1"


def _job(layout: ClusterLayout, asked: KubernetesSettings) -> Object:
    head = {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},  # noqa: S104
        "template": _pods(layout, asked, "head", _HEAD, 0),
    }
    cluster = {
        "headGroupSpec": head,
        "workerGroupSpecs": [_group(layout, asked, pool) for pool in layout.pools],
    }
    meta = {"name": "afserve", "namespace": asked.namespace}
    spec = {
        "entrypoint": " ".join(["afserve", *entrypoint(layout)]),
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": cluster,
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": meta, "spec": spec}


def _group(layout: ClusterLayout, asked: KubernetesSettings, pool: NodePool) -> Object:
    sizes = {"cpu": str(layout.sizes.cpus), "memory": f"{layout.sizes.memory}Gi"}
    pods = _pods(layout, asked, str(pool.role), sizes, 0 if pool.on_cpu else 1)
    pods["spec"]["nodeSelector"] = asked.selector(pool)
    offered = f'"{{\\"afserve_{pool.role}\\": 1}}"'
    return {
        "groupName": str(pool.role),
        "replicas": pool.nodes,
        "minReplicas": 0,
        "maxReplicas": 2 * pool.nodes,
        "rayStartParams": {"num-cpus": str(layout.sizes.cpus), "resources": offered},
        "template": pods,
    }


def _pods(
    layout: ClusterLayout, asked: KubernetesSettings, name: str, sizes: dict[str, Any], gpus: int
) -> Object:
    """KubeRay writes the command of Ray's own containers, so ours has none."""
    box = container(layout, asked, f"ray-{name}", [], sizes, gpus)
    del box["args"]
    found: Object = template(layout, asked, name, box)["template"]
    return found


def _within(asked: KubernetesSettings) -> Object:
    """Ray's hosts talk to one another on many ports, and nobody else reaches them: whoever does may run code there."""
    found = policy(asked, "head", [{"from": [{"podSelector": {}}]}])
    found["metadata"]["name"] = "within"
    found["spec"]["podSelector"] = {}
    return found
