"""The KV memory of an attention node and its one owner: tensors, what kernels made of them, blocks and their names.

Micro-batches compute over it, the scheduler hands out its blocks as integers, and whoever moves blocks (to other nodes,
to host memory, to a file) reads and writes them here as bytes. It knows no requests.
"""

import hashlib
import itertools
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from afserve.comm.disk.passes import CacheMemory
from afserve.comm.kv.messages import Payload
from afserve.config import EngineConfig
from afserve.engine.kv.blocks import BlockPool, Hash, OnEvict, OnIdle, root_hash
from afserve.engine.kv.grouped_memory import GroupedMemory
from afserve.engine.kv.grouped_pool import GroupedPool
from afserve.engine.kv.groups import KvGroup, check_groups, one_group
from afserve.errors import ProtocolError, RendezvousError
from afserve.kernels.cache import LAYOUT, KeptShape, PagedCache
from afserve.kernels.devices.device import Event
from afserve.kernels.formats.eight_bits import KV_DTYPES
from afserve.models.decoder import AttentionModel
from afserve.models.keeping import kept_as_stored


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What two caches must share for a block's bytes of one to be a block of the other.

    model       the shape and the weights that keys and values were computed with
    dtype       of every element, and of what it was rounded from where that is another
    layout      what a token has in each layer, and the version of the order of bytes
    block_size  tokens
    """

    model: str
    dtype: str
    layout: str
    block_size: int

    @property
    def digest(self) -> str:
        """64 hex digits of BLAKE2b; equal for equal fingerprints only."""
        parts = [str(getattr(self, field.name)).encode() for field in fields(self)]
        digest = hashlib.blake2b(digest_size=32, person=b"afserve-kv")
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def expect(self, other: "Fingerprint") -> None:
        """Raises RendezvousError that names the first field of `other` that differs from this one."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                raise RendezvousError(
                    f"KV blocks: their {field.name} is {theirs}, this cache's is {mine}; compute the tokens again here",
                    param=field.name,
                )


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Contents of whole blocks between two caches: a row of bytes per block, in the order of kernels/cache.py."""

    fingerprint: Fingerprint
    bytes_NY: Tensor


class KvCache:
    """`halves` are the model's attention halves over this memory, `pool` says who holds which block. Blocks are those
    of the first group, with what the others keep of the same tokens; `group_of` has each layer's group. `predicting`
    is the half of a layer that drafts, `beside` what a head has, whose keys and values are a part of every block:
    whoever moves blocks knows nothing of it. What a layer or an EAGLE-3 head has of a block's last token is by
    whichever token followed first, and of tokens that were computed while it rested it has nothing of use.

    `weights` names the numbers that the model was loaded with, equal wherever those are: caches that were not told
    share blocks with nobody. Whoever sets `on_evict` is told the blocks whose contents can no longer be found, with
    their names, while they can still be read, and `on_part` those that are about to lose what one group keeps of them;
    `on_idle` is told the named blocks that nobody holds any more; `on_forgotten` names that can no longer be found.
    """

    def __init__(
        self, model: AttentionModel, config: EngineConfig, weights: str = "", groups: Sequence[KvGroup] = ()
    ) -> None:
        """Without `groups` all layers are one. Raises ValueError where these do not fit the model."""
        keeps, dtype = model.keeps, KV_DTYPES.get(config.kv_dtype, model.dtype)
        groups = groups or one_group(keeps, config.kv_blocks, config.block_size)
        first = groups[0]
        assert (first.blocks, first.block_size) == (config.kv_blocks, config.block_size), "the first has both"
        check_groups(groups, len(keeps), config.most_rows)
        named = weights or f"unknown weights {secrets.token_hex(16)}"
        if model.head is not None:
            named += f", a head {model.head.identity}"
        self.fingerprint = Fingerprint(
            model=f"{model.spec.fingerprint()}, {named}",
            dtype=_named(dtype, model.dtype),
            layout=layout_of(keeps) if len(groups) == 1 else grouped_layout(groups, keeps),
            block_size=first.block_size,
        )
        self.experts_as_stored = kept_as_stored(model.spec, model.ops, model.dtype)
        self.dense_in_fp8 = model.dense_in_fp8
        self.on_evict: OnEvict | None = None
        self.on_idle: OnIdle | None = None
        self.on_part: OnEvict | None = None
        self.on_forgotten: Callable[[Hash], None] | None = None
        root, caching = root_hash(self.fingerprint.model, self.fingerprint.dtype), config.prefix_caching
        told: dict[str, Any] = {"on_evict": self._evicted, "on_idle": self._idle}
        self.pool: BlockPool
        self._memory: PagedCache | GroupedMemory
        if len(groups) == 1:
            self.pool = BlockPool(first.blocks, first.block_size, caching=caching, root=root, **told)
            near = [config.kv_near_rows * model.fetches(layer) for layer in range(len(keeps))]
            self._memory = model.ops.open_cache(keeps, first.blocks, first.block_size, dtype, near)
            self.group_of = [0] * len(keeps)
        else:
            self.pool = pool = GroupedPool(
                groups, caching=caching, root=root, **told, on_part=self._loses_part
            )
            self._memory = memory = GroupedMemory(groups, keeps, pool, model.ops, dtype)
            self.group_of = memory.group_of
        caches, own = self._memory.layers, len(model.layers)
        end = own + len(model.predicting)
        self.near = self._memory.near if isinstance(self._memory, PagedCache) else ()
        bound = model.bind(caches[:end], self.near[:end])
        self.halves, self.predicting = bound[:own], bound[own:]
        self.beside = caches[end:]

    @property
    def block_bytes(self) -> int:
        """Of one block over all layers."""
        return self._memory.block_bytes

    @property
    def bytes_apart(self) -> tuple[int, int, int]:
        """Of a block what lies in the host since only some rows are near, and what does not, with four bytes a row that
        say where it is near; and of all near rows together."""
        rows = [near for near in self.near if near is not None]
        far = sum(near.row_RC[0].nbytes for near in rows) * self.pool.block_size
        kept = self.block_bytes - far + 4 * len(rows) * self.pool.block_size
        return far, kept, sum(near.row_RC.nbytes for near in rows)

    @property
    def rows_read(self) -> tuple[int, int]:
        """Chosen rows that were near, and those that were fetched. It waits for the device."""
        counts_L4 = (
            self._memory.counts_L4 if any(self.near) and isinstance(self._memory, PagedCache) else None
        )
        if counts_L4 is None:
            return 0, 0
        _, _, found, fetched = counts_L4.sum(0).tolist()
        return found, fetched

    def read(self, blocks: Sequence[int]) -> KvBlocks:
        """A copy of those blocks on the host, in the order asked for. Between two steps: a block that is being filled
        has whatever was written so far. Raises ValueError for a block that there is not."""
        return KvBlocks(self.fingerprint, self._memory.read(blocks))

    def copy_out(self, blocks: Sequence[int], rows_NY: Tensor) -> Event | None:
        """As `read`, into memory of the host, a row of bytes for each block. None where they are there; else what to
        wait for: a GPU goes on copying to pinned memory. Blocks may be given out meanwhile. Raises ValueError."""
        return self._memory.copy_out(blocks, rows_NY)

    def write(self, blocks: Sequence[int], contents: KvBlocks) -> None:
        """Replace held blocks by what `read` gave, of this cache or of one with the same fingerprint.

        Raises RendezvousError naming the field of the fingerprint that differs, ProtocolError where the bytes are not
        those of so many blocks, ValueError for blocks that nobody holds; nothing is written then.
        """
        self.fingerprint.expect(contents.fingerprint)
        found, wanted = tuple(contents.bytes_NY.shape), (len(blocks), self.block_bytes)
        if found != wanted:
            raise ProtocolError(
                f"KV blocks: {found} bytes came, {wanted[0]} blocks of {wanted[1]} bytes were expected; send them again"
            )
        idle = [block for block in blocks if not self.pool.is_held(block)]
        if idle:
            raise ValueError(f"blocks: nobody holds {idle[0]}; allocate it before it is written")
        self._memory.write(blocks, contents.bytes_NY)

    def read_layer(self, layer: int, blocks: Sequence[int]) -> memoryview:
        """What those blocks have of one layer, one behind the other, in the middle of a step."""
        return self._memory.read_layer(layer, blocks).view(-1).numpy().data

    def write_layer(self, layer: int, blocks: Sequence[int], payload: Payload) -> bool:
        """Replace it by what `read_layer` gave in a cache with the same fingerprint; False where its size is not
        that of so many blocks. Only of blocks that one sequence holds and nobody can find yet."""
        size = self._memory.layer_bytes(layer)
        if len(payload) != len(blocks) * size:
            return False
        rows_NY = torch.frombuffer(payload, dtype=torch.uint8).view(len(blocks), size)
        self._memory.write_layer(layer, blocks, rows_NY)
        return True

    def layer_bytes(self, layer: int) -> int:
        """Of one block in this layer."""
        return self._memory.layer_bytes(layer)

    @property
    def part_bytes(self) -> int:
        """Of the smallest of `parts`; 0 where bytes cannot be put there."""
        return self._memory.part_bytes

    def parts(self, blocks: Sequence[int]) -> list[list[memoryview]]:
        """The memory of held blocks that nobody can find yet, each in parts that follow each other as in `read`. What
        is written there may come from any thread; a block whose contents are not right is cleared. Raises ValueError
        for a block that there is not."""
        return self._memory.parts(blocks)

    def memory(self, blocks: Sequence[int]) -> CacheMemory | None:
        """The memory of these blocks as addresses, which stay while this cache does, in whatever order its bytes are;
        None where it is not the host's. Raises ValueError for a block that there is not."""
        wrong = next((block for block in blocks if not 0 <= block < self.pool.blocks), None)
        if wrong is not None:
            raise ValueError(f"blocks: {wrong}, the cache has {self.pool.blocks}")
        parts = self._memory.memory
        if parts and isinstance(self._memory, PagedCache):
            self._memory.forget_rows(blocks)
        return CacheMemory(parts, blocks) if parts else None

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero whole blocks in every layer."""
        for layer in range(len(self.group_of)) if blocks else ():
            self._memory.clear_blocks(layer, blocks)

    def _evicted(self, blocks: Sequence[tuple[int, Hash]]) -> None:
        if self.on_evict is not None:
            self.on_evict(blocks)
        if self.on_forgotten is not None:
            for _, name in blocks:
                self.on_forgotten(name)

    def _loses_part(self, blocks: Sequence[tuple[int, Hash]]) -> None:
        if self.on_part is not None:
            self.on_part(blocks)

    def _idle(self, blocks: Sequence[tuple[int, Hash]]) -> None:
        if self.on_idle is not None:
            self.on_idle(blocks)


def _named(kept: torch.dtype, computed: torch.dtype) -> str:
    """E.g. "bfloat16", or "int8 of bfloat16"."""
    names = [str(dtype).removeprefix("torch.") for dtype in (kept, computed)]
    return names[0] if kept is computed else " of ".join(names)


def layout_of(layers: Iterable[KeptShape]) -> str:
    """E.g. "v1: 24 x 2 heads of 64 + 64, 3 x 1 heads of 576, 9 x a state of 548864"."""
    runs = [(shape, len(list(run))) for shape, run in itertools.groupby(layers)]
    return f"v{LAYOUT}: {', '.join(f'{count} x {shape}' for shape, count in runs)}"


def grouped_layout(groups: Sequence[KvGroup], layers: Sequence[KeptShape]) -> str:
    """E.g. "v1: 24 x 2 heads of 64 + 64; window 128 of 8 tokens a block: v1: 24 x 2 heads of 64 + 64"."""
    found = []
    for group in groups:
        what = (
            f"{group.kind}{f' {group.window}' if group.window else ''} of {group.block_size} tokens a block"
        )
        found.append(f"{what}, layers {group.layers}: {layout_of(layers[layer] for layer in group.layers)}")
    return "; ".join(found)
