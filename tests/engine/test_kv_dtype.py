"""The KV cache in 8 bits: the same tokens wherever its blocks go, fewer bytes, nothing mixed with other blocks."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from afserve.comm.m2n.bank import LocalTicket
from afserve.config import ModelSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import colocated, spec_of
from afserve.engine.kv.cache import KvBlocks
from afserve.engine.scheduling.request import SamplingParams, TokenEvent
from afserve.errors import RendezvousError
from tests.engine.driving import FAMILIES, GREEDY, collect, config, drive, prompts, requests

Tiny = Callable[[str], Path]
KV_DTYPES = ("int8", "fp8")


def opened(tiny_checkpoint: Tiny, name: str, kv_dtype: str, **fields: object) -> AttentionNode[LocalTicket]:
    source = ModelSource(str(tiny_checkpoint(name)), name)
    return colocated(source, config(kv_dtype=kv_dtype, **fields))


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_do_not_depend_on_steps_blocks_or_moves(
    name: str, kv_dtype: str, tiny_checkpoint: Tiny
) -> None:
    """Prompts in other pieces, one sequence after the other, too few blocks for all, a prefix that is found, and blocks
    that move while they are read."""
    whole = collect(drive(opened(tiny_checkpoint, name, kv_dtype), requests(prompts())))
    pieces = opened(tiny_checkpoint, name, kv_dtype, max_batch_tokens=12, micro_batches=2)
    assert collect(drive(pieces, requests(prompts()))) == whole, "prompts in other pieces"
    assert collect(drive(pieces, requests(prompts()))) == whole, "prefixes that were found"
    tight = opened(tiny_checkpoint, name, kv_dtype, kv_blocks=18, prefix_caching=False)
    assert collect(drive(tight, requests(prompts()))) == whole, "preemption"
    assert collect(moving(opened(tiny_checkpoint, name, kv_dtype, prefix_caching=False))) == whole, "moves"


def moving(node: AttentionNode[LocalTicket], params: SamplingParams = GREEDY) -> list[TokenEvent]:
    """All events of the common requests, while blocks move again and again; what they leave is filled with NaN."""
    kv, rng = node.kv, random.Random(1)
    for request in requests(prompts(), params):
        node.submit(request)
    events = []
    while node.busy:
        events += node.step()
        for sequence in (s for s in node._scheduler._running if not s.in_flight):
            if rng.random() < 0.2:
                old = sequence.blocks
                sequence.blocks = kv.pool.allocate(len(old))
                kv.write(sequence.blocks, kv.read(old))
                spoiled = torch.full((len(old), kv.block_bytes), 0xFF, dtype=torch.uint8)
                kv.write(old, KvBlocks(kv.fingerprint, spoiled))
                kv.pool.release(old)
    return events


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_blocks_of_another_dtype_are_neither_found_nor_taken(kv_dtype: str, tiny_checkpoint: Tiny) -> None:
    plain, eight = (opened(tiny_checkpoint, "qwen3", each).kv for each in ("auto", kv_dtype))
    assert eight.pool.root != plain.pool.root and eight.fingerprint.digest != plain.fingerprint.digest
    with pytest.raises(RendezvousError, match=r"their dtype is float32, this cache's is .* of float32"):
        eight.write(eight.pool.allocate(1), KvBlocks(plain.fingerprint, plain.read([0]).bytes_NY))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_has_the_bytes_that_the_plan_says(name: str, tiny_checkpoint: Tiny) -> None:
    spec = spec_of(ModelSource(str(tiny_checkpoint(name)), name))
    for dtype, element in (("auto", 4), ("int8", 1), ("fp8", 1)):
        kv = opened(tiny_checkpoint, name, dtype).kv
        states = kv.block_bytes - 8 * spec.kv_bytes_per_token(element)
        assert spec.state_bytes() <= states <= spec.state_bytes() + 8 * 8 * spec.layers
