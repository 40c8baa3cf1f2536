"""A node on several devices, which are one processor here: what a tensor-parallel node will do, on the product's doors.

Each device has its share of every layer's heads, with their keys and values in memory of its own; an all-reduce joins
what the devices add. Layers without heads are whole on the device that leads. Shapes: T tokens, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from afserve.comm.m2n.bank import LocalBankLink, LocalTicket
from afserve.config import EngineConfig, ModelSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import build_attention_node, build_expert_bank, spec_of
from afserve.engine.kv.groups import KvGroup
from afserve.errors import ConfigError
from afserve.kernels.cache import BlockIndexedShape, KeptShape, LayerCache, LayerShape
from afserve.kernels.layer import Half
from afserve.kernels.ops import Ops, open_ops
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference import Reference
from afserve.models.attention import GroupedQueryHalf, LatentHalf, load_attention
from afserve.models.dense import Dense
from afserve.models.halves import AttentionHalf, HeadShare, LayerTensors
from afserve.models.rope import Rotary
from afserve.models.router import Router
from afserve.spec import ModelSpec
from afserve.spec_parts import AttentionSpec

Joint = Callable[[Sequence[Tensor]], Tensor]
"""Every device's float32 (T, H) part, in the order of devices, becomes their sum on the one that leads."""


def add_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The first two, then the third, and so on: a row has the same sum in every batch."""
    total_TH = parts[0]
    for part_TH in parts[1:]:
        total_TH = total_TH + part_TH
    return total_TH


def head_shares(a: AttentionSpec, count: int) -> list[HeadShare]:
    """One for each of `count` devices; the first one's device leads. Raises ConfigError where there are none."""
    if a.heads % count or (a.kv_heads % count and count % a.kv_heads):
        heads = f"{a.heads} heads with {a.kv_heads} of keys and values"
        raise ConfigError(f"devices: {heads} are no {count} equal shares; use another number")
    if count > 1 and a.qk_norm == "width":
        raise ConfigError("devices: this model normalises all heads together; use one device a node")
    return [HeadShare(index, count) for index in range(count)]


class Devices:
    """So many of them, as a `LoadHalf`: the node's own `ops` lead."""

    def __init__(self, count: int, joint: Joint = add_in_order) -> None:
        self._further, self._joint = [open_ops("cpu", 1) for _ in range(count - 1)], joint

    def __call__(
        self, spec: ModelSpec, tensors: LayerTensors, ops: Ops, rope: Rotary, router: Router | None
    ) -> AttentionHalf:
        attention, every = spec.layer(tensors.layer).attention, (ops, *self._further)
        if attention.kind == "linear":
            return load_attention(spec, tensors, ops, rope, router)
        kind: type[GroupedQueryHalf] | type[LatentHalf]
        kind = LatentHalf if attention.kind == "mla" else GroupedQueryHalf
        parts = []
        for its, share in zip(every, head_shares(attention, len(every)), strict=True):
            dense = tensors.dense if its is ops else Dense(its, tensors.dtype)
            own = replace(tensors, dense=dense, share=share)
            parts.append(kind(spec, own, its, rope, router if its is ops else None))
        return JoinedHalf(parts, every, self._joint)


@dataclass(frozen=True)
class KeptApart:
    """What a layer keeps, in memory of every device: all keys, then all values. The bytes of a block are those of one
    device, but that they have a head as often as devices keep it."""

    each: KeptShape
    devices: tuple[Ops, ...] = field(compare=False)

    def __str__(self) -> str:
        if isinstance(self.each, LayerShape | BlockIndexedShape):
            return str(replace(self.each, heads=len(self.devices) * self.each.heads))
        return f"{len(self.devices)} times {self.each}"

    def open_layer(self, backend: Reference, blocks: int, size: int, dtype: torch.dtype) -> LayerCache:
        apart = [ops.open_cache([self.each], blocks, size, dtype).layers[0] for ops in self.devices]
        return tuple(chain(*zip(*apart, strict=True)))


class JoinedHalf:
    """Of `parts`, one a device; the first one's has the norm behind it and the router."""

    def __init__(
        self, parts: Sequence[GroupedQueryHalf | LatentHalf], devices: tuple[Ops, ...], joint: Joint
    ) -> None:
        self._parts, self._devices, self._joint = parts, devices, joint
        self.keeps = KeptApart(parts[0].keeps, devices)

    def bind(self, cache: LayerCache) -> "BoundJoined":
        count = len(self._parts)
        parts = [part.bind(cache[at::count]) for at, part in enumerate(self._parts)]
        lead, ops, joint = parts[0].bound, self._devices[0], self._joint

        def run(x_TH: Tensor, batch: PagedBatch) -> Half:
            return ops.join_half(x_TH, lead, joint([part.add_heads(x_TH, batch) for part in parts]))

        return BoundJoined(run)


class BoundJoined:
    bound = None  # no backend runs it in one call

    def __init__(self, run: Callable[[Tensor, PagedBatch], Half]) -> None:
        self._run = run

    def __call__(self, x_TH: Tensor, batch: PagedBatch) -> Half:
        return self._run(x_TH, batch)


def colocated_on(
    devices: Devices, source: ModelSource, config: EngineConfig, groups: Sequence[KvGroup] = ()
) -> AttentionNode[LocalTicket]:
    """As `colocated`."""
    spec = spec_of(source)
    held = [(layer, expert, expert) for layer in range(spec.moe_layers) for expert in range(spec.experts)]
    link = LocalBankLink(build_expert_bank(source, held, spec.experts))
    return build_attention_node(source, config, link, groups=groups, load_half=devices)
