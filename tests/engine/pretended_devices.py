"""A node on several devices, which are one processor here."""

from collections.abc import Sequence

from afserve.comm.m2n.bank import LocalBankLink, LocalTicket
from afserve.config import EngineConfig, ModelSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import build_attention_node, build_expert_bank, open_devices, spec_of
from afserve.engine.kv.groups import KvGroup
from afserve.kernels.ops import open_ops
from afserve.models.devices.several import Joint


def colocated_on(
    source: ModelSource, config: EngineConfig, groups: Sequence[KvGroup] = (), joint: Joint | None = None
) -> AttentionNode[LocalTicket]:
    """As `colocated`, on as many as `config` says, with another joint."""
    spec, ops = spec_of(source, config.drafts()), open_ops(config.device, config.threads)
    held = [(layer, expert, expert) for layer in range(spec.moe_layers) for expert in range(spec.experts)]
    bank = build_expert_bank(source, held, spec.experts, ops=ops, draft=config.drafts())
    devices = open_devices(source, spec, config, ops, joint)
    return build_attention_node(source, config, LocalBankLink(bank), ops=ops, groups=groups, devices=devices)
