"""The KV cache's owner: blocks read here go on anywhere with the same fingerprint, and nowhere else."""

import random
from dataclasses import replace

import pytest
import torch

from afserve.comm.m2n.bank import LocalBankLink
from afserve.config import ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, spec_of
from afserve.engine.kv.cache import Fingerprint, KvBlocks, layout_of
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.sequence import Sequence
from afserve.errors import ProtocolError, RendezvousError
from afserve.kernels.cache import LayerShape
from afserve.kernels.ops import open_ops
from tests.engine.driving import FAMILIES, GREEDY, NEW, collect, config, drive, prompts, requests

KEPT = [("native", 8), ("native", 16), ("torch", 8)]  # natively blocks of 16 are in tiles, those of 8 in rows
HAND_OVERS = [("native", "torch", 1), ("torch", "native", 17), ("native", "native", 40)]


def opened(name, tiny_checkpoint, backend="torch", dtype="auto", weights="", **fields):
    """A colocated node whose ops are one backend's."""
    if backend == "native":
        pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    source, ops = ModelSource(str(tiny_checkpoint(name)), name, dtype=dtype), open_ops("cpu", 1, backend)
    spec = spec_of(source)
    held = [(layer, e, e) for layer in range(spec.moe_layers) for e in range(spec.experts)]
    link = LocalBankLink(build_expert_bank(source, held, spec.experts, ops=ops))
    return build_attention_node(source, config(**fields), link, ops=ops, weights=weights)


def running(node):
    return [s for s in node._scheduler._running if not s.in_flight]


def until(node, tokens):
    """Steps until each of the common prompts has so many tokens: {request: what it has so far}."""
    said: dict[int, list[int]] = {}
    for request in requests(prompts()):
        node.submit(request)
    while min((len(t) for t in said.values()), default=0) < tokens or len(said) < len(prompts()):
        for event in node.step():
            said.setdefault(event.handle, []).extend(event.token_ids)
    return said


def move(sequence, node):
    """What a hand-over does: blocks are read at one node and written at another, and the request goes on there."""
    blocks = node.kv.pool.allocate(len(sequence.blocks))
    request = sequence.request
    moved = Sequence.start(request, node._scheduler._order, sequence.eos_ids, node.kv.pool.root)
    moved.tokens, moved.computed, moved.blocks = list(sequence.tokens), sequence.computed, blocks
    moved.started, moved.micro_batch = True, 0
    node._scheduler._order += 1
    node._scheduler.open[request.handle] = moved
    node._scheduler._running.enter(moved, 0)
    return blocks


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("backend", "block_size"), KEPT)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.slow
def test_a_sequence_goes_on_over_copies_of_its_blocks(name, backend, block_size, tiny_checkpoint, expected):
    """Again and again all running sequences move to other blocks, and those that they had are filled with NaN."""
    node = opened(
        name, tiny_checkpoint, backend, block_size=block_size, prefix_caching=False, max_batch_tokens=12
    )
    node.note_line(0, moving=True)
    kv, rng, moves = node.kv, random.Random(name), 0
    for request in requests(prompts()):
        node.submit(request)
    events = []
    while node.busy:
        events += node.step()
        for sequence in running(node) if rng.random() < 0.2 else ():
            old = sequence.blocks
            sequence.blocks = kv.pool.allocate(len(old))
            order = rng.sample(range(len(old)), len(old))
            kv.write([sequence.blocks[i] for i in order], kv.read([old[i] for i in order]))
            spoiled = torch.full((len(old), kv.block_bytes), 0xFF, dtype=torch.uint8)
            kv.write(old, KvBlocks(kv.fingerprint, spoiled))
            kv.pool.release(old)
            moves += 1
        node.check()
    assert moves > 10
    assert collect(events) == expected(name)


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize(("here", "there", "tokens"), HAND_OVERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_sequence_goes_on_in_another_cache(name, here, there, tokens, tiny_checkpoint, expected):
    """At any token, with a block that is half full, over the order of another backend."""
    first, second = (opened(name, tiny_checkpoint, backend, block_size=16) for backend in (here, there))
    assert first.kv.fingerprint == second.kv.fingerprint
    second.kv.pool.allocate(5)  # other block ids than there
    before = until(first, tokens)
    for sequence in running(first):
        second.kv.write(move(sequence, second), first.kv.read(sequence.blocks))
        first.cancel(sequence.request.handle)
    assert not any(event.token_ids for event in first.step()) and not first.busy
    after: dict[int, list[int]] = {name: [] for name in before}
    while second.busy:
        for event in second.step():
            after[event.handle].extend(event.token_ids)
    assert [before[i] + after[i] for i in range(len(before))] == expected(name)
    assert all(len(after[request]) == NEW - len(before[request]) for request in before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3", "qwen3"])
def test_blocks_are_found_by_name_at_another_node(name, tiny_checkpoint, expected):
    """Only full blocks travel, under their names: a prompt that begins with them does not compute them again."""
    first, second = (opened(name, tiny_checkpoint, backend) for backend in ("native", "torch"))
    before = until(first, 20)
    for index, prompt in enumerate(prompts()):
        sequence = next(s for s in running(first) if s.request.handle == index)
        size, pool = first.kv.fingerprint.block_size, second.kv.pool
        full = sequence.computed // size
        blocks = pool.allocate(full)
        second.kv.write(blocks, first.kv.read(sequence.blocks[:full]))
        for block, digest in zip(blocks, sequence.full_hashes(size), strict=False):
            pool.publish(block, digest)
        pool.release(blocks)
        said = before[index]
        rest = replace(GREEDY, max_tokens=NEW - len(said))
        events = drive(second, [GenerationRequest(0, (*prompt, *said), rest)])
        assert (
            sum(event.cached_tokens for event in events) == (len(prompt) + len(said) - 1) // size * size > 0
        )
        assert said + collect(events)[0] == expected(name)[index]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3", "qwen3"])
def test_evicted_blocks_can_be_kept_elsewhere_and_put_back(name, tiny_checkpoint, expected):
    """A tier in ten lines: what is evicted is read while it is still there, and written back when it is asked for."""
    node = opened(name, tiny_checkpoint, "native", kv_blocks=15)
    kept, told = {}, []

    def keep(blocks):
        for block, digest in blocks:
            told.append((block, digest))
            kept[digest] = node.kv.read([block])

    node.kv.on_evict = keep
    for index, request in enumerate(requests(prompts())):
        drive(node, [replace(request, handle=index)])
    assert len(told) > 5
    first = Sequence.start(GenerationRequest(77, prompts()[0]), 0, frozenset(), node.kv.pool.root)
    first.tokens += expected(name)[0][:40]
    digests = first.full_hashes(8)[: (len(first.tokens) - 1) // 8]
    assert node.kv.pool.match(digests) == [] and set(digests) <= set(kept)
    blocks = node.kv.pool.allocate(len(digests))
    for block, digest in zip(blocks, digests, strict=True):
        node.kv.write([block], kept[digest])
        node.kv.pool.publish(block, digest)
    node.kv.pool.release(blocks)
    rest = SamplingParams(max_tokens=NEW - 40, temperature=0.0, ignore_eos=True)
    events = drive(node, [GenerationRequest(0, tuple(first.tokens), rest)])
    assert sum(event.cached_tokens for event in events) == 8 * len(digests)
    assert collect(events)[0] == expected(name)[0][40:]


def test_other_blocks_are_refused_by_the_field_that_differs(tiny_checkpoint):
    node = opened("qwen3", tiny_checkpoint)
    kv, blocks = node.kv, node.kv.pool.allocate(2)
    before = kv.read(range(kv.pool.blocks)).bytes_NY
    others = {
        "model": [opened("qwen3", tiny_checkpoint, weights="another"), opened("qwen3-tied", tiny_checkpoint)],
        "dtype": [opened("qwen3", tiny_checkpoint, dtype="bfloat16")],
        "block_size": [opened("qwen3", tiny_checkpoint, block_size=16)],
    }
    for field, nodes in others.items():
        for other in nodes:
            with pytest.raises(RendezvousError, match=rf"their {field} is .*, this cache's is .*") as refused:
                kv.write(blocks, other.kv.read([0, 1]))
            assert refused.value.param == field
    newer = replace(kv.fingerprint, layout=kv.fingerprint.layout.replace("v1", "v2"))
    with pytest.raises(
        RendezvousError, match="their layout is v2: 3 x 2 heads of 16 \\+ 16, this cache's is v1"
    ):
        kv.write(blocks, KvBlocks(newer, kv.read([0, 1]).bytes_NY))
    assert torch.equal(kv.read(range(kv.pool.blocks)).bytes_NY, before)


def test_what_is_not_so_many_blocks_is_refused(tiny_checkpoint):
    kv = opened("v3", tiny_checkpoint).kv
    sent, blocks = kv.read([0, 1]), kv.pool.allocate(2)
    with pytest.raises(
        ProtocolError, match=rf"\(2, {kv.block_bytes}\) bytes came, 1 blocks of {kv.block_bytes}"
    ):
        kv.write(blocks[:1], sent)
    with pytest.raises(ProtocolError, match="bytes came"):
        kv.write(blocks, replace(sent, bytes_NY=sent.bytes_NY[:, 1:]))
    kv.pool.release(blocks[1:])
    with pytest.raises(ValueError, match=f"nobody holds {blocks[1]}"):
        kv.write(blocks, sent)
    with pytest.raises(ValueError, match="the cache has 64"):
        kv.read([64])


def test_a_fingerprint_says_what_blocks_are_and_its_digest_stays(tiny_checkpoint):
    """Digests stand in files and on wires: another one here means that kept blocks are lost."""
    fixed = Fingerprint("m", "bfloat16", "v1: 24 x 2 heads of 64 + 64", 16)
    assert fixed.digest == "e1852a81c8042dac80e68523a7f02b033834494835f31c7fe4b63b3b4fcf220a"
    changed = [
        replace(fixed, model="n"),
        replace(fixed, dtype="float16"),
        replace(fixed, layout="v2"),
        replace(fixed, block_size=8),
    ]
    assert len({fixed.digest, *(other.digest for other in changed)}) == 5
    mixed = [LayerShape(2, 64, 64)] * 2 + [LayerShape(1, 576)] + [LayerShape(2, 64, 32)]
    assert layout_of(mixed) == "v1: 2 x 2 heads of 64 + 64, 1 x 1 heads of 576, 1 x 2 heads of 64 + 32"
    node = opened("v3", tiny_checkpoint)
    assert node.kv.fingerprint.layout == "v1: 3 x 1 heads of 28" and node.kv.fingerprint.dtype == "float32"
    assert node.kv.block_bytes == 3 * 8 * 28 * 4


@pytest.mark.slow
def test_who_was_not_told_its_weights_shares_with_nobody(tiny_checkpoint):
    from afserve.engine.attention_node import AttentionNode

    told = opened("v3", tiny_checkpoint)
    unknown = [AttentionNode(told._micro_batches[0]._model, told._link, config()) for _ in range(2)]
    prints = {node.kv.fingerprint.digest for node in (told, *unknown)}
    roots = {node.kv.pool.root for node in (told, *unknown)}
    assert len(prints) == len(roots) == 3
    assert opened("v3", tiny_checkpoint).kv.pool.root == told.kv.pool.root
    assert collect(drive(unknown[0], requests(prompts()))) == collect(drive(told, requests(prompts())))
