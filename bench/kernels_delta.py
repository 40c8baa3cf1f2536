"""Cases of gated delta nets for `bench.kernels`: Qwen3-Next's layer over more states than the caches hold.

The peer is transformers' code for the same from the same state, without the convolution: its recurrent form for
decoding, its chunks of 64 for a prompt.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from afserve.kernels.cache import StateShape
from afserve.kernels.delta import DeltaLayer, DeltaRows, DeltaShape
from afserve.kernels.native import Native
from afserve.kernels.paged import PagedBatch
from afserve.launch.measure.clock import out_of_cache
from afserve.launch.measure.experts import BF16
from bench.kernels_cases import Case

SHAPE = DeltaShape(16, 32, 128, 128, 4)
BLOCK, PROMPT = 64, 512
BATCHES = (1, 8, 32)


def rows_of(tokens: int) -> DeltaRows:
    return DeltaRows(
        torch.randn(tokens, SHAPE.channels).to(BF16),
        -torch.rand(tokens, SHAPE.value_heads) * 0.1,
        torch.rand(tokens, SHAPE.value_heads),
    )


def batch_of(blocks: list[list[int]], first: int, tokens: int) -> PagedBatch:
    """So many tokens from position `first` of sequences with these blocks."""
    count, end = len(blocks), first + tokens
    position = torch.arange(first, end).repeat(count)
    starts = torch.arange(count + 1, dtype=torch.int32) * tokens
    contexts = torch.full((count,), end, dtype=torch.int32)
    return PagedBatch(position, position, starts, contexts, torch.tensor(blocks).int(), tokens, end)


def delta_cases(native: Native, quick: bool) -> Iterator[Case]:
    layer = DeltaLayer(SHAPE, torch.randn(SHAPE.taps, SHAPE.channels))
    state = 4 * SHAPE.numbers
    blocks = max(-(-out_of_cache() // state), BATCHES[-1], PROMPT // BLOCK)
    shape = StateShape(SHAPE.numbers)
    cache = native.empty_cache((blocks, BLOCK, shape.width(BLOCK, BF16)), BF16)
    states = shape.of_blocks(cache.fill_(0.0))
    for sequences in BATCHES[:1] if quick else BATCHES:
        steps = [
            batch_of([[first + s] for s in range(sequences)], 9, 1)
            for first in range(0, blocks - sequences + 1, sequences)
        ]
        rows = rows_of(sequences)

        def decode(rows: DeltaRows = rows, steps: list[PagedBatch] = steps) -> None:
            for batch in steps:
                native.delta(rows, layer, states, BLOCK, batch)

        peer = peer_of(rows, sequences, 1)
        name = f"decode, batch {sequences}"
        yield Case("delta", name, decode, len(steps), 2 * state * sequences, peer=peer, repeats=5)
    rows, batch = rows_of(PROMPT), batch_of([list(range(PROMPT // BLOCK))], 0, PROMPT)

    def prompt() -> None:
        native.delta(rows, layer, states, BLOCK, batch)

    flops = 6 * SHAPE.matrix * PROMPT
    yield Case(
        "delta", f"prompt of {PROMPT} tokens", prompt, flops=flops, peer=peer_of(rows, 1, PROMPT), repeats=5
    )


def peer_of(rows: DeltaRows, sequences: int, tokens: int) -> Callable[[], object]:
    """transformers' own function over tensors of (sequences, tokens, heads, size)."""
    from transformers.models.qwen3_next import modeling_qwen3_next as peer

    def shaped(x: Tensor, size: int) -> Tensor:
        return x.view(sequences, tokens, -1, size)

    widths = SHAPE.widths
    q, k, v = rows.mixed_TC.split(widths, 1)
    q, k, v = (shaped(x.contiguous(), n) for x, n in ((q, SHAPE.key), (k, SHAPE.key), (v, SHAPE.value)))
    decay, beta = (x.view(sequences, tokens, -1) for x in (rows.decay_TE, rows.beta_TV))
    run = peer.torch_chunk_gated_delta_rule if tokens > 1 else peer.torch_recurrent_gated_delta_rule
    count = max(1, out_of_cache() // (4 * SHAPE.matrix * sequences)) if tokens == 1 else 1
    kept = itertools.cycle(
        [torch.zeros(sequences, SHAPE.value_heads, SHAPE.key, SHAPE.value) for _ in range(count)]
    )

    def call() -> None:
        run(
            q, k, v, g=decay, beta=beta, initial_state=next(kept), output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    return call
