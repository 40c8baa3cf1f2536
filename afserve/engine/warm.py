"""Before a node says ready: what serving launches is launched once, so that no kernel is compiled while users wait.

A kernel is compiled for its dtypes and tiles, and not for how many rows there are; which tiles it takes follows from
few sizes, and those are gone through here. Nothing that is computed counts: keys and values go to a block that nobody
holds yet. The kernels by which nodes exchange rows are `comm/device_exchange/rehearsal.py`'s.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from afserve.clock import MonotonicClock
from afserve.comm.m2n.bank import Bank, LocalBankLink, LocalTicket, NoBank
from afserve.config import EngineConfig
from afserve.engine.kv.cache import KvCache
from afserve.engine.step.layer_runner import LayerRunner
from afserve.engine.step.load import ExpertLoad
from afserve.engine.step.meter import Meter
from afserve.engine.step.step_input import StepInput
from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from afserve.models.decoder import AttentionModel
from afserve.models.tables.bank import TabledBank
from afserve.models.tier.bank import TieredBank

_PROMPT = 128  # tokens of a prompt: more take the same kernels
_PIECE = 2  # tokens of one too short for a prompt's kernels
_FEW = 3  # sequences of a batch that is not one


class _Nothing(NoBank):
    """In the place of expert nodes, which are not asked."""

    def forward(
        self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor, add: bool = False
    ) -> None:
        out_RH.zero_()


def compiled_first(ops: Ops, warm: Callable[[], object]) -> None:
    """`warm`, where it can be for kernels to be compiled side by side first, and again to launch them."""
    if ops.compile_ahead is not None:
        ops.compile_ahead(warm)
    warm()


def warm_attention(model: AttentionModel, kv: KvCache, config: EngineConfig) -> int:
    """Decoding and prompts, apart and together, with contexts that are one part and several. Gives how many steps."""
    longest = min(config.max_model_len, config.kv_blocks * config.block_size)
    prompt = max(1, min(_PROMPT, config.most_rows - 1 - _PIECE, longest))
    piece = min(_PIECE, longest)
    several = [
        queries
        for queries in ([1], [1] * _FEW, [prompt], [1, piece, prompt])
        if sum(queries) <= config.most_rows
    ]
    steps = [(queries, context) for queries in several for context in sorted({max(queries), longest})]
    for queries, context in steps:
        run_once(model, kv, config, _step(queries, context, _block_sizes(kv), model.ops.device))
    return len(steps)


def run_once(model: AttentionModel, kv: KvCache, config: EngineConfig, step: StepInput) -> None:
    """All layers of a step and the choice of its tokens; experts of nodes give 0."""
    spec, meter = model.spec, Meter(MonotonicClock())
    load = ExpertLoad.of(spec, 1, model.ops.device)
    with torch.inference_mode():
        link = LocalBankLink(_Nothing())
        runner = LayerRunner[LocalTicket](0, model, kv, link, load, meter, config.most_rows)
        x_TH = _result(runner.run_step(step))
        runner.settle_step(step)
        runner.take_failures()
        model.ops.argmax(model.logits(x_TH))


def warm_experts(bank: Bank, layers: int, like_TH: Tensor, top_k: int, slots: int, most_rows: int) -> int:
    """All classes of tiles that up to `most_rows` rows take, in each layer, as layers may keep weights each in its own
    way. `like_TH` has the rows' width, dtype and device. Gives how many calls."""
    calls, tiered = 0, bank.inner if isinstance(bank, TabledBank) else bank
    if isinstance(tiered, TieredBank):  # its kernels alone: a call of all slots would bring all of them
        bank, slots = tiered.bank, tiered.places
        if top_k > 1:  # passes are of choices
            calls = warm_experts(bank, layers, like_TH, 1, slots, most_rows * top_k)
    with torch.inference_mode():
        for rows in _sizes(most_rows):
            x_RH = like_TH.new_zeros((rows, like_TH.shape[1]))
            slot_RK = torch.arange(rows * top_k, device=x_RH.device).remainder_(slots).int().view(rows, top_k)
            weight_RK = torch.zeros((rows, top_k), dtype=torch.float32, device=x_RH.device)
            sums_RH = torch.zeros(x_RH.shape, dtype=torch.float32, device=x_RH.device)
            for layer in range(layers):
                bank.forward(layer, x_RH, slot_RK, weight_RK, sums_RH)
                calls += 1
    return calls


def _result(run: Iterator[object]) -> Tensor:
    try:
        next(run)
    except StopIteration as ended:
        found: Tensor = ended.value
        return found
    raise AssertionError("nobody is waited for")


def _block_sizes(kv: KvCache) -> list[int]:
    return [kv.fingerprint.block_size, *(further.block_size for further in kv.pool.further)]


def _step(
    queries: Sequence[int], context: int, block_sizes: Sequence[int], device: torch.device
) -> StepInput:
    """So many tokens of each sequence, at the end of `context`."""
    first, *further = (_batch(queries, context, size, device) for size in block_sizes)
    tokens = sum(queries)
    row_R = torch.arange(tokens, device=device)
    ends = list(first.starts[1:])
    decodes = sum(count for count in queries if count == 1)
    return StepInput(
        torch.zeros_like(row_R),
        first,
        row_R,
        list(range(tokens)),
        ends,
        True,
        decodes,
        True,
        None,
        tuple(further),
    )


def _batch(queries: Sequence[int], context: int, block_size: int, device: torch.device) -> PagedBatch:
    """Every table is of the first block alone."""
    starts = [0]
    for count in queries:
        starts.append(starts[-1] + count)

    def column(numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    places = [place for count in queries for place in range(context - count, context)]
    return PagedBatch(
        column(places, torch.int64),
        column([place % block_size for place in places], torch.int64),
        column(starts, torch.int32),
        column([context] * len(queries), torch.int32),
        torch.zeros((len(queries), -(-context // block_size)), dtype=torch.int32, device=device),
        max(queries),
        context,
        tuple(starts),
        (context,) * len(queries),
    )


def _sizes(most: int) -> Iterator[int]:
    """1, 4, 16 ... rows, and the most."""
    rows = 1
    while rows < most:
        yield rows
        rows *= 4
    yield most
