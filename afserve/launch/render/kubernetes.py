"""A run as objects of Kubernetes or of KubeRay, which the templates beside this file say: plain values, from YAML.

Needs PyYAML, of `afserve[render]`.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from afserve.errors import ConfigError
from afserve.launch.render.layout import HTTP_PORT, NODES_PORT, ClusterLayout, NodePool
from afserve.member import Role

Object = dict[str, Any]
USER = 10001
RUN, CERTS = "/run/afserve", "/run/afserve-certs"
_ADDRESS = ["--host", "0.0.0.0", "--port", str(HTTP_PORT)]  # noqa: S104
_KEYS = ["--api-key-file", f"{RUN}/api.key", "--admin-key-file", f"{RUN}/admin.key"]
_TOKEN = ["--token-file", f"{RUN}/token"]
_DRAIN = 30  # seconds that answers have when a gateway goes
_GONE = 5  # until nobody sends a gateway new connections
_PER_GATEWAY = 64  # running sequences, on the average


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


def manifests(layout: ClusterLayout, asked: KubernetesSettings) -> dict[str, list[Object]]:
    """Objects by the file that they belong in. Raises ConfigError where PyYAML is not installed."""
    trust = _trust(layout)
    up = layout.up(f"$(POD_IP):{NODES_PORT}", *_TOKEN, *trust)
    join = ["--join", f"controller:{NODES_PORT}", *_TOKEN, *trust]
    return _objects(
        "kubernetes.yaml.jinja",
        layout,
        asked,
        controller=[*up, "--node-memory", str(layout.sizes.memory), *_ADDRESS, *_KEYS],
        joining=join,
        gateway=["node", "--role", "gateway", *join, *_ADDRESS, "--drain-seconds", str(_DRAIN), *_KEYS],
        gone=_GONE,
        drain=_DRAIN,
        per_gateway=_PER_GATEWAY,
        scales=_scales(layout),
    )


def _scales(layout: ClusterLayout) -> bool:
    """Whether the controller asks Kubernetes for nodes."""
    words = " ".join(layout.extra).replace("=", " ").split()
    return ("--nodes-from", "kubernetes") in pairwise(words)


def ray_manifests(layout: ClusterLayout, asked: KubernetesSettings) -> dict[str, list[Object]]:
    """As `manifests`; KubeRay writes the command of Ray's own containers, so ours have none."""
    return _objects(
        "kuberay.yaml.jinja", layout, asked, entrypoint=" ".join(["afserve", *entrypoint(layout)])
    )


def entrypoint(layout: ClusterLayout) -> list[str]:
    """The arguments of `afserve` on the head: the nodes go where their role's resource is."""
    words = ["up", "--ray", "auto", *layout.counts(), *_trust(layout)]
    for pool in layout.pools:
        gpu = "" if pool.on_cpu else ",GPU=1"
        resources = f"CPU={layout.sizes.cpus}{gpu},afserve_{pool.role}=1"
        words += ["--ray-attention" if pool.role == "attention" else "--ray-experts", resources]
    return [*words, *_ADDRESS, *_KEYS, *layout.extra]


def _trust(layout: ClusterLayout) -> list[str]:
    return ["--certs", CERTS] if layout.certs else ["--insecure-nodes"]


def _objects(
    template: str, layout: ClusterLayout, asked: KubernetesSettings, **more: object
) -> dict[str, list[Object]]:
    if importlib.util.find_spec("yaml") is None:
        raise ConfigError("render: PyYAML is not installed here; type: pip install 'afserve[render]'")
    import yaml

    pages = Environment(  # noqa: S701  YAML, whose values the filter quotes
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["yaml"] = lambda value: yaml.safe_dump(
        [value], default_flow_style=True, sort_keys=False, width=float("inf")
    )[1:-2]
    ports = {"http": HTTP_PORT, "nodes": NODES_PORT}
    text = pages.get_template(template).render(
        layout=layout, asked=asked, run=RUN, certs=CERTS, user=USER, **ports, **more
    )
    found: dict[str, list[Object]] = yaml.safe_load(text)
    return found
