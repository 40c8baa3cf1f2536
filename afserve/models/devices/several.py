"""The attention side of a node on several devices: each has its share of heads and FFNs, with keys and values in memory
of its own, and what they add to the residual stream is joined on the first one, which leads.

One process drives all of them, so that whoever plans steps, moves blocks or recovers knows of one node. On a CPU they
are pretended: one processor computes the shares one after the other. Shapes: T tokens, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from afserve.families.device_shares import ffn_is_split, is_split
from afserve.kernels.cache import LayerCache
from afserve.kernels.devices.opened import device_of
from afserve.kernels.formats.scaled import FP8, BlockScaled
from afserve.kernels.layer import Half
from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from afserve.models.attention import (
    BoundGroupedQuery,
    BoundLatent,
    GroupedQueryHalf,
    LatentHalf,
    load_attention,
)
from afserve.models.dense import Dense
from afserve.models.devices.batches import batch_on, take_choice
from afserve.models.devices.kept import EachShape, KeptApart
from afserve.models.halves import AttentionHalf, HeadShare, LayerTensors, Part, SplitLoading
from afserve.models.rope import Rotary
from afserve.models.router import Router
from afserve.models.weights import SCALE_SUFFIX, WholeTensors
from afserve.spec import ModelSpec

Joint = Callable[[Sequence[Tensor]], Tensor]
"""Every device's float32 (T, H) part, in the order of devices, becomes their sum on the one that leads."""

BoundPart = BoundGroupedQuery | BoundLatent
Share = TypeVar("Share")
Read = dict[tuple[str, torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class ReadOnce(WholeTensors):
    """What all devices of a node are given of a layer: who asks for a tensor first has it `read`, and it is copied."""

    whole: WholeTensors
    device: torch.device
    read: Read

    def has_tensor(self, name: str) -> bool:
        return self.whole.has_tensor(name)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if (name, dtype) not in self.read:
            self.read[name, dtype] = self.whole.tensor(name, shape, dtype)
        return self.read[name, dtype].to(self.device, copy=True)

    def block_scaled(self, name: str, shape: tuple[int, int]) -> BlockScaled | None:
        codes, scales = (name, FP8), (name + SCALE_SUFFIX, torch.float32)
        if codes not in self.read:
            found = self.whole.block_scaled(name, shape)
            if found is None:
                return None
            self.read[codes], self.read[scales] = found.q_OI, found.scale
        return BlockScaled(*(self.read[each].to(self.device) for each in (codes, scales)))


class Devices:
    """All of a node's by their kernels: `lead`, the node's own, and `further` ones."""

    def __init__(self, lead: Ops, further: Sequence[Ops], joint: Joint | None = None) -> None:
        self._lead, self._further, self._joint = lead, further, joint or lead.add_parts
        self.every = (lead, *further)

    def loading(self, *, split_head: bool) -> SplitLoading:
        further = tuple(one.device for one in self._further)
        return SplitLoading(
            self._load_half, self._split_ffn, self._split_head if split_head else None, further
        )

    def _load_half(
        self, spec: ModelSpec, tensors: LayerTensors, ops: Ops, rope: Rotary, router: Router | None
    ) -> AttentionHalf:
        """Of heads that are split; a whole one is on the device that leads."""
        attention = spec.layer(tensors.layer).attention
        if not is_split(attention):
            return load_attention(spec, tensors, ops, rope, router)
        kind: type[GroupedQueryHalf] | type[LatentHalf]
        kind = LatentHalf if attention.kind == "mla" else GroupedQueryHalf

        def load(own: LayerTensors, its: Ops) -> GroupedQueryHalf | LatentHalf:
            return kind(spec, own, its, _rope_on(rope, its.device), router if own.share.index == 0 else None)

        return JoinedHalf(self._load_shares(load, tensors), attention.kv_heads, self)

    def _split_ffn(
        self, load: Callable[[LayerTensors, Ops], Part], tensors: LayerTensors, inner: int
    ) -> Part | None:
        """What all devices add together, in float32; None for an FFN that is whole on the one that leads."""
        if not ffn_is_split(inner, len(self.every)):
            return None
        parts = self._load_shares(load, tensors)
        return lambda x_TH: self.sum_parts(x_TH, parts)

    def _split_head(self, head_VH: Tensor, bias_V: Tensor | None) -> Part:
        """The vocabulary is dealt to the devices, and their logits stand side by side on the first one: each is a sum
        of its own, so that whoever reads them sees those of one device."""
        count, parts = len(self.every), list[Part]()
        biases = [None] * count if bias_V is None else bias_V.tensor_split(count)
        for ops, own_VH, own_V in zip(self.every, head_VH.tensor_split(count), biases, strict=True):
            with device_of(ops.device).as_current():
                bias_O = None if own_V is None else own_V.to(ops.device)
                head = Dense(ops, head_VH.dtype).linear(own_VH.to(ops.device, copy=True), bias_O=bias_O)
                parts.append(partial(ops.logits, packed=head))
        lead = self._lead.device

        def scored(x_RH: Tensor) -> Tensor:
            found = self._of_each(x_RH, parts)
            return torch.cat([logits_RO.to(lead, non_blocking=True) for logits_RO in found], -1)

        return scored

    def sum_parts(self, x_TH: Tensor, parts: Sequence[Part]) -> Tensor:
        """The first device reads what lies with the others: when they have made it, and before they write there again.
        One process tells all of them, so places in their queues are enough; no kernel waits for another one's flag."""
        sums = self._of_each(x_TH, parts)
        own, *others = (device_of(ops.device).current() for ops in self.every)
        for other in others:
            own.follow(other)
        sum_TH = self._joint(sums)
        for other in others:
            other.follow(own)
        return sum_TH

    def _of_each(self, x_TH: Tensor, parts: Sequence[Part]) -> list[Tensor]:
        """Each in its device's memory. Rows are on their way to all before the first is told its part, so that none
        waits."""
        there = [x_TH.to(one.device, non_blocking=True) for one in self._further]
        sums = [parts[0](x_TH)]
        for one, part, own_TH in zip(self._further, parts[1:], there, strict=True):
            with device_of(one.device).as_current():
                sums.append(part(own_TH))
        return sums

    def _load_shares(self, load: Callable[[LayerTensors, Ops], Share], tensors: LayerTensors) -> list[Share]:
        """One a device, loaded while that is the current one."""
        found, read = list[Share](), Read()
        for index, ops in enumerate(self.every):
            with device_of(ops.device).as_current():
                source, share = ReadOnce(tensors.source, ops.device, read), HeadShare(index, len(self.every))
                dense = Dense(ops, tensors.dtype) if index else tensors.dense
                found.append(load(replace(tensors, source=source, dense=dense, share=share), ops))
        return found


class JoinedHalf:
    """Of `parts`, one a device; the first one's has the norm behind it and the router."""

    def __init__(
        self, parts: Sequence[GroupedQueryHalf | LatentHalf], kv_heads: int, devices: Devices
    ) -> None:
        self._parts, self._devices = parts, devices
        each = parts[0].keeps
        assert isinstance(each, EachShape), "of heads or a latent"
        self.keeps = KeptApart(each, kv_heads, devices.every)

    def bind(self, cache: LayerCache) -> "BoundJoined":
        own: list[BoundPart] = []
        for number, (part, ops) in enumerate(zip(self._parts, self._devices.every, strict=True)):
            with device_of(ops.device).as_current():
                own.append(part.bind(self.keeps.of_device(number, cache)))
        return BoundJoined(own, self._devices)


class BoundJoined:
    bound = None  # no backend runs it in one call

    def __init__(self, parts: Sequence[BoundPart], devices: Devices) -> None:
        self._parts, self._devices = parts, devices

    def __call__(self, x_TH: Tensor, batch: PagedBatch) -> Half:
        devices, lead = self._devices, self._parts[0]
        own = [partial(_add_heads, part, devices, n, batch) for n, part in enumerate(self._parts)]
        return lead.ops.join_half(x_TH, lead.bound, devices.sum_parts(x_TH, own))


def _add_heads(part: BoundPart, devices: Devices, number: int, batch: PagedBatch, x_TH: Tensor) -> Tensor:
    own = batch_on(devices.every[number], number, batch)
    if isinstance(part, BoundLatent) and part.bound.layer.reuses:
        take_choice(batch, own)
    return part.add_heads(x_TH, own)


def _rope_on(rope: Rotary, device: torch.device) -> Rotary:
    return rope if rope.cos_PD.device == device else Rotary(rope.cos_PD.to(device), rope.sin_PD.to(device))
