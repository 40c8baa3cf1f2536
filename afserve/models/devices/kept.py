"""What a layer keeps on several devices, and the bytes that its blocks have for everybody else: those of one device,
whatever it was computed on."""

from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from afserve.kernels.cache import BlockIndexedShape, IndexedShape, LayerCache, LayerShape
from afserve.kernels.ops import Ops
from afserve.kernels.reference import Reference

EachShape = LayerShape | IndexedShape | BlockIndexedShape


@dataclass(frozen=True, slots=True)
class KeptApart:
    """`each` is what one of the `devices` keeps, of a layer that has so many `heads` of keys and values. The layer's
    cache is each tensor once for every device, then the next one."""

    each: EachShape
    heads: int
    devices: tuple[Ops, ...] = field(compare=False)

    def __str__(self) -> str:
        """As on one device."""
        each = self.each
        if isinstance(each, IndexedShape) or (isinstance(each, LayerShape) and each.value is None):
            return str(each)
        return str(replace(each, heads=self.heads))

    @property
    def alike(self) -> tuple[int, ...]:
        """Latents and index keys are the same on all devices, keys and values where a head is on several."""
        count = len(self.devices)
        copies = max(count // self.heads, 1)
        by_head = (copies,) * (count // copies)
        match self.each:
            case IndexedShape():
                return count, count
            case BlockIndexedShape():
                return *by_head, *by_head, count
            case LayerShape(value=None):
                return (count,)
            case LayerShape():
                return *by_head, *by_head

    def open_layer(self, backend: Reference, blocks: int, size: int, dtype: torch.dtype) -> LayerCache:
        apart = [ops.open_cache([self.each], blocks, size, dtype).layers[0] for ops in self.devices]
        return tuple(chain(*zip(*apart, strict=True)))

    def of_device(self, number: int, cache: LayerCache) -> LayerCache:
        """What one of them has of a layer's cache."""
        return cache[number :: len(self.devices)]
