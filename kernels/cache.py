"""A node's whole KV cache as paged tensors, and its blocks as bytes that mean the same on every backend.

A backend may keep blocks in any order (`tiled.py`); bytes outside are always in this one. A block is one row of them:
layer after layer; of a layer its keys (G, B, D), then its values (G, B, D), or its latent rows (B, D), and the keys of
its indexer behind either if it has one, or its state in float32, filled up to B rows; elements are the cache's dtype in
the machine's (little-endian) order, with nothing between. In 8 bits rows of keys and latents end with scales
(formats/eight_bits.py). `LAYOUT` is this order's version.

It knows no requests and not who holds a block. Shapes: N blocks, G heads, B tokens of a block, D elements, Y bytes.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from afserve.kernels.devices.device import Event
from afserve.kernels.devices.memory_part import MemoryPart
from afserve.kernels.devices.opened import device_of
from afserve.kernels.devices.pages import lent_to
from afserve.kernels.formats.eight_bits import key_width
from afserve.kernels.indexer import NearRows
from afserve.kernels.reference import Reference
from afserve.kernels.tiled import KEYS, by_token, from_token, layout_of, shape_of

LAYOUT = 1
_ALIGNED = 16  # bytes: any element, and the words that keys are moved in
LayerCache = tuple[Tensor, ...]
Held = Sequence[LayerCache]
"""Tensors of a layer, each with those that hold the same."""


class KeptShape(Protocol):
    """What one layer keeps. As text it says what a block's bytes are: caches that share blocks have the same one."""

    @property
    def alike(self) -> tuple[int, ...]:
        """Of the tensors of `open_layer`, how many in a row hold the same, as each of several devices has its own copy;
        empty where no two do."""

    def open_layer(self, backend: Reference, blocks: int, size: int, dtype: torch.dtype) -> LayerCache:
        """Zeroed memory for blocks of `size` tokens, whose bytes are those of its tensors one behind the other."""
        ...


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token: for each of `heads` a key and a value of so many elements. With `value` None it
    is one row of `key` elements for all heads (MLA's latent)."""

    alike: ClassVar[tuple[int, ...]] = ()
    heads: int
    key: int
    value: int | None = None

    def __str__(self) -> str:
        return f"{self.heads} heads of {self.key}" + ("" if self.value is None else f" + {self.value}")

    @property
    def elements(self) -> int:
        return self.heads * (self.key + (self.value or 0))

    def open_layer(
        self, backend: Reference, blocks: int, size: int, dtype: torch.dtype, far: bool = False
    ) -> LayerCache:
        """With `far` latents lie in memory of the host."""
        if self.value is None:
            return (_rows_of(backend, (blocks, size, key_width(self.key, dtype)), dtype, far),)
        return backend.empty_kv((blocks, self.heads, size), (key_width(self.key, dtype), self.value), dtype)


@dataclass(frozen=True, slots=True)
class IndexedShape:
    """What a layer with an indexer keeps of a token: a row of `latent` elements, and a key of `index` by which it is
    chosen."""

    alike: ClassVar[tuple[int, ...]] = ()
    latent: int
    index: int

    def __str__(self) -> str:
        return f"a latent of {self.latent} with an index key of {self.index}"

    def open_layer(
        self, backend: Reference, blocks: int, size: int, dtype: torch.dtype, far: bool = False
    ) -> LayerCache:
        """With `far` latents lie in memory of the host, and index keys do not."""
        latents, keys = ((blocks, size, key_width(numbers, dtype)) for numbers in (self.latent, self.index))
        return _rows_of(backend, latents, dtype, far), backend.empty_cache(keys, dtype)


@dataclass(frozen=True, slots=True)
class BlockIndexedShape:
    """What a layer with an indexer of blocks keeps of a token: for each of `heads` a key and a value of `size`
    elements, in rows, since single ones are attended; and a key of `index` by which they are chosen."""

    alike: ClassVar[tuple[int, ...]] = ()
    heads: int
    size: int
    index: int

    def __str__(self) -> str:
        return f"{self.heads} heads of {self.size} + {self.size} in rows with an index key of {self.index}"

    def open_layer(self, backend: Reference, blocks: int, size: int, dtype: torch.dtype) -> LayerCache:
        widths = key_width(self.size, dtype), self.size
        k_NGBD, v_NGBD = (backend.empty_cache((blocks, self.heads, size, width), dtype) for width in widths)
        return k_NGBD, v_NGBD, backend.empty_cache((blocks, size, key_width(self.index, dtype)), dtype)


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one layer keeps once in every block: `numbers` of float32, its state behind the block's last token."""

    alike: ClassVar[tuple[int, ...]] = ()
    numbers: int

    def __str__(self) -> str:
        return f"a state of {self.numbers}"

    def open_layer(self, backend: Reference, blocks: int, size: int, dtype: torch.dtype) -> LayerCache:
        return (backend.empty_cache((blocks, size, self.width(size, dtype)), dtype),)

    def width(self, block_size: int, dtype: torch.dtype) -> int:
        """Elements of the cache's dtype for each token of a block, so that all of them hold the state; what is left is
        not used. It is a multiple of 2, or of 4 in 8 bits, so that blocks begin at whole float32 numbers."""
        word = torch.float32.itemsize // dtype.itemsize
        even = max(2, word)
        return -(-self.numbers * word // (block_size * even)) * even

    def of_blocks(self, cache_NBE: Tensor) -> Tensor:
        """(N, numbers) float32: a view of a cache of that width."""
        return cache_NBE.flatten(1).view(torch.float32)[:, : self.numbers]


class PagedCache:
    """`layers` holds each layer's tensors, (keys, values), (latent,), either with index keys, or (states,): ops take
    them, nobody else looks. What several devices keep `alike` is one part of a block's bytes, and written to all."""

    def __init__(
        self,
        layers: tuple[LayerCache, ...],
        block_size: int,
        dtype: torch.dtype,
        alike: Sequence[tuple[int, ...]] = (),
        near: Sequence[NearRows | None] = (),
        counts_L4: Tensor | None = None,
    ) -> None:
        """`alike` of each layer, as `KeptShape.alike`; the rows of it that are `near`, if not all, and their counts."""
        self.near, self.counts_L4 = near, counts_L4
        self.layers = layers
        self.block_size = block_size
        self.dtype = dtype
        self.blocks = layers[0][0].shape[0]
        runs = [of or (1,) * len(one) for one, of in zip(layers, alike or [()] * len(layers), strict=True)]
        self._held = [_in_runs(layer, of) for layer, of in zip(layers, runs, strict=True)]
        self.block_bytes = sum(self.layer_bytes(layer) for layer in range(len(layers)))

    def read(self, blocks: Sequence[int]) -> Tensor:
        """(len(blocks), block_bytes) uint8 on the host: a copy of those blocks, in the order that was asked for."""
        found = torch.empty((len(blocks), self.block_bytes), dtype=torch.uint8, device=self._device)
        self._gather(blocks, found)
        return found.cpu()

    def copy_out(self, blocks: Sequence[int], rows_NY: Tensor) -> Event | None:
        """As `read`, into (len(blocks), block_bytes) uint8 on the host. From a GPU to pinned memory it may be under way
        when this returns, before anything that the GPU is told to do later; what is returned then says when it ended.
        Raises ValueError."""
        expect_bytes("rows_NY", rows_NY, (len(blocks), self.block_bytes))
        if self._device.type == "cpu":
            self._gather(blocks, rows_NY)
            return None
        found = torch.empty(rows_NY.shape, dtype=torch.uint8, device=self._device)
        self._gather(blocks, found)
        rows_NY.copy_(found, non_blocking=True)
        return device_of(self._device).current().put_event()

    def layer_bytes(self, layer: int) -> int:
        """Of one block in this layer."""
        return self.dtype.itemsize * sum(first[0].numel() for first, *_ in self._held[layer])

    def read_layer(self, layer: int, blocks: Sequence[int]) -> Tensor:
        """(len(blocks), layer_bytes) uint8 on the host: what these blocks have of one layer. On a GPU it waits for what
        the GPU was told to do so far."""
        shape = len(blocks), self.layer_bytes(layer)
        found = torch.empty(shape, dtype=torch.uint8, device=self._device)
        self._gather(blocks, found, self._held[layer])
        return found.cpu()

    def write_layer(self, layer: int, blocks: Sequence[int], bytes_NY: Tensor) -> None:
        """Replace what these blocks have of one layer by what `read_layer` gave elsewhere. Raises ValueError."""
        self._scatter(blocks, bytes_NY, self.layer_bytes(layer), self._held[layer])
        self.forget_rows(blocks, layer)

    def _gather(self, blocks: Sequence[int], out_NY: Tensor, held: Held | None = None) -> None:
        self._check(blocks)
        runs = _runs(blocks)
        for part, (tensor, *_) in self._parts(out_NY, held):
            for at, first, count in runs:
                part[at : at + count].copy_(by_token(tensor[first : first + count]))

    @cached_property
    def part_bytes(self) -> int:
        """Of the smallest of a block's `parts`; 0 where memory is not in the order of the bytes outside."""
        tensors = self._lone_tensors
        in_order = bool(tensors) and all(by_token(one) is one and one.is_contiguous() for one in tensors)
        return min(size for _, size in self._rows) if in_order and self._device.type == "cpu" else 0

    def parts(self, blocks: Sequence[int]) -> list[list[memoryview]]:
        """The memory of each of these blocks, part behind part as its bytes are in `read`. From any thread; only where
        there are `part_bytes`. Raises ValueError."""
        self._check(blocks)
        self.forget_rows(blocks)
        return [[rows[block * size : (block + 1) * size] for rows, size in self._rows] for block in blocks]

    @cached_property
    def memory(self) -> tuple[MemoryPart, ...]:
        """Of each tensor, in the order of `parts`, where its blocks lie. Empty where that is not the host's memory."""
        tensors = self._lone_tensors
        whole = all(tensor[0].is_contiguous() for tensor in tensors)
        return tuple(map(_memory_of, tensors)) if whole and self._device.type == "cpu" else ()

    @cached_property
    def _lone_tensors(self) -> list[Tensor]:
        """All of them; none where some are alike, so that bytes in one place are not all."""
        tensors = list(itertools.chain.from_iterable(self.layers))
        return tensors if len(tensors) == sum(map(len, self._held)) else []

    @cached_property
    def _rows(self) -> list[tuple[memoryview, int]]:
        """Of each tensor its bytes, and how many of them are a block's."""
        tensors = itertools.chain.from_iterable(self.layers)
        return [(t.view(-1).view(torch.uint8).numpy().data, t[0].numel() * t.itemsize) for t in tensors]

    def write(self, blocks: Sequence[int], bytes_NY: Tensor) -> None:
        """Replace whole blocks by what `read` gave, here or on any other backend. Raises ValueError."""
        self._scatter(blocks, bytes_NY, self.block_bytes)
        self.forget_rows(blocks)

    def clear_blocks(self, layer: int, blocks: Sequence[int]) -> None:
        """Zero what these blocks have of one layer: every order of a cache has its blocks first. Raises ValueError."""
        self._check(blocks)
        for tensor, (_, first, count) in itertools.product(self.layers[layer], _runs(blocks)):
            tensor[first : first + count].zero_()
        self.forget_rows(blocks, layer)

    def _scatter(self, blocks: Sequence[int], bytes_NY: Tensor, row: int, held: Held | None = None) -> None:
        expect_bytes("bytes_NY", bytes_NY, (len(blocks), row))
        if len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks: {len(blocks) - len(set(blocks))} of {len(blocks)} are named twice")
        self._check(blocks)
        moved = bytes_NY
        if self._device.type != "cpu" or not bytes_NY.is_contiguous() or bytes_NY.data_ptr() % _ALIGNED:
            # A fresh copy begins at a whole element, wherever a message put the bytes.
            moved = torch.empty(bytes_NY.shape, dtype=torch.uint8, device=self._device).copy_(bytes_NY)
        runs = _runs(blocks)
        for part, alike in self._parts(moved, held):
            for tensor, (at, first, count) in itertools.product(alike, runs):
                tensor[first : first + count].copy_(from_token(part[at : at + count]))

    def forget_rows(self, blocks: Sequence[int], layer: int | None = None) -> None:
        """These were written, or will be before anything of them is attended: none of their rows is near any more."""
        rows = self.near if layer is None else self.near[layer : layer + 1]
        for near, (_, first, count) in itertools.product(filter(None, rows), _runs(blocks)):
            near.place_S[first * self.block_size : (first + count) * self.block_size].fill_(-1)

    @cached_property
    def _device(self) -> torch.device:
        """What copies: the host, unless something is elsewhere."""
        devices = [tensor.device for tensor in itertools.chain.from_iterable(self.layers)]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    def _check(self, blocks: Sequence[int]) -> None:
        wrong = next((block for block in blocks if not 0 <= block < self.blocks), None)
        if wrong is not None:
            raise ValueError(f"blocks: {wrong}, the cache has {self.blocks}")

    def _parts(self, bytes_NY: Tensor, held: Held | None) -> Iterator[tuple[Tensor, LayerCache]]:
        """For each tensor of one layer, or of all, layer after layer: its columns of a payload, as `by_token` shapes
        its blocks, and itself with those that are alike."""
        elements, first, rows = bytes_NY.view(self.dtype), 0, len(bytes_NY)
        for alike in itertools.chain.from_iterable(self._held) if held is None else held:
            tensor = alike[0]
            last = first + tensor[0].numel()
            part = elements[:, first:last].view(rows, *by_token(tensor).shape[1:])
            first = last
            if tensor.dim() == KEYS:  # a word is elements of one token in either order: fewer things to move
                yield part.view(torch.int32), tuple(one.view(torch.int32) for one in alike)
            else:
                yield part, alike


def _rows_of(backend: Reference, shape: tuple[int, ...], dtype: torch.dtype, far: bool) -> Tensor:
    return lent_to(backend.device, shape, dtype) if far else backend.empty_cache(shape, dtype)


def opened_cache(
    backend: Reference,
    layers: Sequence[KeptShape],
    blocks: int,
    size: int,
    dtype: torch.dtype,
    near: Sequence[int] = (),
) -> PagedCache:
    """The memory of a node's whole KV cache, zeroed, so that reading past a context gives finite numbers. `near`, if
    anything: of each layer 0, or how many rows of its latents are near, which lie in the host then."""
    opened, rows = list[LayerCache](), list[NearRows | None]()
    counts_L4 = torch.zeros((len(layers), 4), dtype=torch.int64, device=backend.device)
    for shape, count in zip(layers, near or [0] * len(layers), strict=True):
        more = {"far": True} if count else {}
        opened.append(shape.open_layer(backend, blocks, size, dtype, **more))
        rows.append(backend.near_rows(opened[-1][0], count, counts_L4[len(rows)]) if count else None)
    return PagedCache(tuple(opened), size, dtype, [shape.alike for shape in layers], rows, counts_L4)


def _in_runs(layer: LayerCache, counts: Sequence[int]) -> Held:
    ends = itertools.accumulate(counts)
    return [layer[end - count : end] for end, count in zip(ends, counts, strict=True)]


def expect_bytes(name: str, bytes_NY: Tensor, shape: tuple[int, int]) -> None:
    if tuple(bytes_NY.shape) != shape or bytes_NY.dtype is not torch.uint8:
        raise ValueError(
            f"{name}: shape {tuple(bytes_NY.shape)} of {bytes_NY.dtype}, expected {shape} of {torch.uint8}"
        )


def _memory_of(tensor: Tensor) -> MemoryPart:
    item, layout = tensor.itemsize, layout_of(tensor)
    size = shape_of(tensor)[3] if layout else 0
    return MemoryPart(
        tensor.data_ptr(), tensor[0].numel() * item, tensor.stride(0) * item, layout, size, item
    )


def _runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """(position in `blocks`, first block, count) of blocks that follow each other: they are copied at once."""
    runs: list[tuple[int, int, int]] = []
    for at, block in enumerate(blocks):
        if runs and block == runs[-1][1] + runs[-1][2]:
            start, first, count = runs[-1]
            runs[-1] = start, first, count + 1
        else:
            runs.append((at, block, 1))
    return runs
