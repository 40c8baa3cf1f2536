"""From a plan to tensors: what kernels read on the device and what the host keeps say the same."""

import random

import pytest
import torch

from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.step_plan import Chunk, ChunkKind, StepPlan
from afserve.engine.step.step_buffers import StepBuffers
from afserve.engine.step.step_input import StepInput, build_step
from afserve.kernels.devices.opened import device_of


def chunk(tokens: int, start: int, count: int, blocks: list[int], kind: ChunkKind) -> Chunk:
    request = GenerationRequest(1, tuple(range(100, 100 + tokens)), SamplingParams(max_tokens=9))
    sequence = Sequence.start(request, 0, frozenset())
    sequence.blocks = blocks
    return Chunk(sequence, start, count, start + count == tokens, kind)


def test_a_decode_and_a_chunk_of_a_prompt() -> None:
    plan = StepPlan(
        0, (chunk(10, 9, 1, [7, 2, 5], ChunkKind.DECODE), chunk(12, 4, 6, [1, 3, 6], ChunkKind.PROMPT))
    )
    step = build_step(plan, 4, StepBuffers(device_of(torch.device("cpu")), 64))
    paged = step.paged
    assert step.token_T.tolist() == [109, 104, 105, 106, 107, 108, 109] and step.decodes == 1
    assert paged.position_T.tolist() == [9, 4, 5, 6, 7, 8, 9]
    assert paged.kv_slot_T.tolist() == [21, 12, 13, 14, 15, 24, 25]
    assert paged.starts == tuple(paged.query_start_S1.tolist()) == (0, 1, 7)
    assert paged.contexts == tuple(paged.context_S.tolist()) == (10, 10)
    assert paged.block_table_SB.tolist() == [[7, 2, 5], [1, 3, 6]]
    assert (paged.max_query, paged.max_context, step.row_R.tolist()) == (6, 10, [0])
    assert step.rows == [0] and step.ends == [1, 1] and not step.all_rows
    assert (step.tokens, step.alone, step.shared) == (7, False, None)


@pytest.mark.slow
def test_addresses_stay_from_step_to_step() -> None:
    """Of a bucket's columns, over 1,000 drawn steps; what a step says is what it says in memory of its own."""
    draw, buffers, plans = random.Random(5), StepBuffers(device_of(torch.device("cpu")), 64), 0
    found: dict[tuple[str, int], list[int]] = {}
    for _ in range(1000):
        chunks = []
        for _ in range(draw.randint(1, 9)):
            tokens, prompt = draw.randint(1, 60), draw.random() < 0.2
            count = draw.randint(1, tokens) if prompt else 1
            blocks = [draw.randrange(99) for _ in range(-(-tokens // 4))]
            kind = ChunkKind.PROMPT if prompt else ChunkKind.DECODE
            chunks.append(chunk(tokens, tokens - count, count, blocks, kind))
        plan = StepPlan(0, tuple(sorted(chunks, key=lambda one: one.kind is ChunkKind.PROMPT)))
        step, apart = (
            build_step(plan, 4, buffers),
            build_step(plan, 4, StepBuffers(device_of(torch.device("cpu")), 64)),
        )
        assert all(map(torch.equal, columns_of(step), columns_of(apart)))
        at = [column.data_ptr() for column in columns_of(step)]
        assert not any(address % 16 for address in at)
        for of, rows, addresses in (("tokens", step.tokens, at[:4]), ("sequences", len(chunks), at[4:])):
            assert found.setdefault((of, (rows - 1).bit_length()), addresses) == addresses
        plans += 1
    assert plans == 1000 and {size for of, size in found if of == "tokens"} >= set(range(8))
    assert {size for of, size in found if of == "sequences"} == set(range(5))
    assert len({at for addresses in found.values() for at in addresses}) == sum(map(len, found.values()))


def test_a_long_prompt_has_a_table_of_one_sequence() -> None:
    """8,192 tokens of a sequence of up to a million need one row of 262,144 blocks, not 8,192 rows of them."""
    buffers = StepBuffers(device_of(torch.device("cpu")), 1 << 20)
    build_step(StepPlan(0, (chunk(8192, 0, 8192, list(range(2048)), ChunkKind.PROMPT),)), 4, buffers)
    assert sum(one.whole.nbytes for one in buffers._sets.values()) < 2_000_000


def columns_of(step: StepInput) -> list[torch.Tensor]:
    paged = step.paged
    return [
        step.token_T, paged.position_T, paged.kv_slot_T, step.row_R,
        paged.query_start_S1, paged.context_S, paged.block_table_SB,
    ]  # fmt: skip
