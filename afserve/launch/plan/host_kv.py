"""Whether the tiers of KV in host memory (--kv-host) fit beside everything else on a host. All sizes are bytes.

Values in, a refusal out that says how much fits.
"""

from dataclasses import replace

from afserve.errors import DoesNotFitError
from afserve.launch.plan.footprint import gib
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.node_memory import NodeWeights, left_by
from afserve.launch.plan.wishes import Share, Wishes


def check_host_kv(wishes: Wishes, nodes: Share, host: Machine, weights: NodeWeights, kv: int) -> None:
    """`host` as it is, also where nodes run on its GPUs; `kv` is the least that each node's KV cache takes. Nodes of
    other hosts see for themselves. Raises DoesNotFitError."""
    asked = wishes.engine.kv_host_bytes
    if not asked:
        return
    on_gpus = wishes.engine.device != "cpu"
    beside = NodeWeights(
        0 if on_gpus else weights.attention, weights.expert if wishes.experts_on == "cpu" else 0
    )
    beside = replace(beside, attention=beside.attention + (0 if on_gpus else kv))
    for share in wishes.hosts or (nodes,):
        if not (share.here and share.attention):
            continue
        most = max(0, left_by(host, share, beside)) // share.attention
        if asked > most:
            many = (
                f"each of {share.attention} attention nodes" if share.attention > 1 else "the attention node"
            )
            raise DoesNotFitError(
                f"--kv-host {wishes.engine.kv_host}: {gib(asked)} for {many} of a host with {gib(host.memory)} free; "
                + (f"at most {most >> 20}MiB fit" if most >> 20 else "nothing fits beside what else is there")
            )
