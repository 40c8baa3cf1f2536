"""The memory of a model with several groups: one cache for each, and blocks of the first group with all that belongs to
them as bytes.

A block's bytes are those of each group, one behind the other, each in the order of kernels/cache.py; then one byte for
each group behind the first, 1 where the block has any of it, filled up to 16. It knows no requests.

Shapes: N blocks of the first group, Y bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.engine.kv.grouped_pool import GroupedPool
from afserve.engine.kv.groups import KvGroup
from afserve.kernels.cache import KeptShape, LayerCache, expect_bytes
from afserve.kernels.devices.device import Event
from afserve.kernels.devices.memory_part import MemoryPart
from afserve.kernels.ops import Ops

_MARKS = 16  # bytes: blocks begin at any element


class GroupedMemory:
    """As `kernels.cache.PagedCache`, which it has one of for each group; bytes are copied, never read in place."""

    part_bytes = 0
    memory: tuple[MemoryPart, ...] = ()

    def __init__(
        self,
        groups: Sequence[KvGroup],
        layers: Sequence[KeptShape],
        pool: GroupedPool,
        ops: Ops,
        dtype: torch.dtype,
    ) -> None:
        self._pool = pool
        self._caches = [
            ops.open_cache([layers[layer] for layer in group.layers], group.blocks, group.block_size, dtype)
            for group in groups
        ]
        self._per = [groups[0].block_size // group.block_size for group in groups]
        place = {layer: (group, at) for group, of in enumerate(groups) for at, layer in enumerate(of.layers)}
        self._place = [place[layer] for layer in range(len(layers))]
        self.group_of = [group for group, _ in self._place]

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        return tuple(self._caches[group].layers[at] for group, at in self._place)

    @property
    def block_bytes(self) -> int:
        return sum(self._sizes) + _MARKS

    @property
    def _sizes(self) -> list[int]:
        """Of what one block of the first group has in each group."""
        return [cache.block_bytes * per for cache, per in zip(self._caches, self._per, strict=True)]

    def read(self, blocks: Sequence[int]) -> Tensor:
        """(N, block_bytes) uint8 on the host: a copy, in the order that was asked for. Raises ValueError."""
        columns = [self._caches[0].read(blocks)]
        marks_NY = torch.zeros((len(blocks), _MARKS), dtype=torch.uint8)
        for at, further in enumerate(self._pool.further):
            cache, size = self._caches[at + 1], self._sizes[at + 1]
            marks_NY[:, at] = torch.tensor([block in further for block in blocks], dtype=torch.uint8)
            bytes_NY = cache.read(further.table(blocks)).view(len(blocks), size)
            columns.append(bytes_NY * marks_NY[:, at : at + 1])
        return torch.cat([*columns, marks_NY], 1)

    def copy_out(self, blocks: Sequence[int], rows_NY: Tensor) -> Event | None:
        """As `read`, into memory of the host; it is there when this returns. Raises ValueError."""
        expect_bytes("rows_NY", rows_NY, (len(blocks), self.block_bytes))
        rows_NY.copy_(self.read(blocks))
        return None

    def write(self, blocks: Sequence[int], bytes_NY: Tensor) -> None:
        """Replace whole blocks by what `read` gave. What does not fit of a group that sees the last tokens only is
        left out, the first blocks' before the last ones'. Raises ValueError."""
        parts = bytes_NY.split([*self._sizes, _MARKS], 1)
        self._caches[0].write(blocks, parts[0].contiguous())
        marks = parts[-1].tolist()
        for at, further in enumerate(self._pool.further):
            rows = [row for row in range(len(blocks)) if marks[row][at] and further.attach(blocks[row])]
            # Later ones may have taken earlier ones' place.
            rows = [row for row in rows if blocks[row] in further]
            if rows:
                table = further.table([blocks[row] for row in rows])
                self._caches[at + 1].write(table, parts[at + 1][rows].reshape(len(table), -1))

    def layer_bytes(self, layer: int) -> int:
        group, at = self._place[layer]
        return self._caches[group].layer_bytes(at) * self._per[group]

    def read_layer(self, layer: int, blocks: Sequence[int]) -> Tensor:
        """(N, layer_bytes) uint8 on the host, of blocks that have all of this layer. Raises ValueError."""
        group, at = self._place[layer]
        return self._caches[group].read_layer(at, self._table(group, blocks)).view(len(blocks), -1)

    def write_layer(self, layer: int, blocks: Sequence[int], bytes_NY: Tensor) -> None:
        """Replace it by what `read_layer` gave elsewhere. Raises ValueError."""
        group, at = self._place[layer]
        table = self._table(group, blocks)
        self._caches[group].write_layer(at, table, bytes_NY.reshape(len(table), -1))

    def clear_blocks(self, layer: int, blocks: Sequence[int]) -> None:
        """Zero what these blocks have of one layer."""
        group, at = self._place[layer]
        self._caches[group].clear_blocks(at, self._table(group, blocks))

    def _table(self, group: int, blocks: Sequence[int]) -> Sequence[int]:
        return self._pool.own_blocks(group, blocks)

    def parts(self, blocks: Sequence[int]) -> list[list[memoryview]]:
        """There are none: bytes of a block lie in several memories."""
        raise ValueError("blocks of several groups have no parts")
