"""The integers that describe one batch over a paged KV cache, as tensors every kernel reads.

Shapes: T tokens in the batch, S sequences, B most blocks per sequence, N blocks in the cache.
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Tokens of one step. Sequence s owns tokens query_start_S1[s] : query_start_S1[s + 1].

    position_T     int64, position of each token in its sequence
    kv_slot_T      int64, block * block_size + offset where the token's key and value go
    query_start_S1 int32, S + 1 entries, first 0, last T
    context_S      int32, length of each sequence including this step's tokens
    block_table_SB int32, block ids in order; entries past the context are never read

    starts and contexts are query_start_S1 and context_S as the host knows them, for who would have to wait for a device
    to read those; empty where nobody said.

    `handle` is what a backend made of the tensors (`Ops.bind_batch`); None: every op looks them up. `replace` drops it.
    """

    position_T: Tensor
    kv_slot_T: Tensor
    query_start_S1: Tensor
    context_S: Tensor
    block_table_SB: Tensor
    max_query: int
    max_context: int
    starts: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    handle: object | None = field(default=None, init=False, repr=False, compare=False)

    def with_handle(self, handle: object) -> "PagedBatch":
        """For backends: the same batch, whose tensors `handle` knows."""
        bound = PagedBatch(  # field by field: `replace` takes twice as long, once per step
            self.position_T,
            self.kv_slot_T,
            self.query_start_S1,
            self.context_S,
            self.block_table_SB,
            self.max_query,
            self.max_context,
            self.starts,
            self.contexts,
        )
        object.__setattr__(bound, "handle", handle)
        return bound

    @property
    def tokens(self) -> int:
        return self.position_T.shape[0]

    @property
    def sequences(self) -> int:
        return self.context_S.shape[0]
