"""From a plan to tensors: what kernels read on the device and what the host keeps say the same."""

import torch

from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.step_plan import Chunk, ChunkKind, StepPlan
from afserve.engine.step.step_input import build_step


def chunk(tokens: int, start: int, count: int, blocks: list[int], kind: ChunkKind) -> Chunk:
    request = GenerationRequest(1, tuple(range(100, 100 + tokens)), SamplingParams(max_tokens=9))
    sequence = Sequence.start(request, 0, frozenset())
    sequence.blocks = blocks
    return Chunk(sequence, start, count, start + count == tokens, kind)


def test_a_decode_and_a_chunk_of_a_prompt() -> None:
    plan = StepPlan(
        0, (chunk(10, 9, 1, [7, 2, 5], ChunkKind.DECODE), chunk(12, 4, 6, [1, 3, 6], ChunkKind.PROMPT))
    )
    step = build_step(plan, 4, torch.device("cpu"))
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
