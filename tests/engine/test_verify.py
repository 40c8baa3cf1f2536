"""Rows of kind VERIFY: drafts are computed beside the newest token, drawn row by row and kept as far as they are right.

Who drafts here is told the answer and spoils some of it, so every length of a confirmed run is met.
"""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.kv.blocks import block_hash
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.scheduler import Scheduler
from afserve.engine.scheduling.step_plan import DECODE, PROMPT, VERIFY
from afserve.grammars.grammar import of_schema
from afserve.kernels.ops import Ops
from tests.engine.driving import config, prompts, requests
from tests.engine.local_cluster import LocalCluster

NEW = 24
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "seed": 5},
    "penalised": {"temperature": 0.7, "seed": 9, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "scored": {"temperature": 0.0, "logprobs": 2},
}


class Prompter:
    """Asked between two steps: drafts up to `most` tokens of the known answers, some of them wrong."""

    def __init__(self, scheduler, answers, most=4, wrong=0.3):
        self._scheduler, self._answers, self._most, self._wrong = scheduler, answers, most, wrong
        self._random = random.Random(3)

    def __call__(self):
        for sequence in self._scheduler._running:
            answer = self._answers[sequence.request.handle]
            if not sequence.in_flight:
                following = answer[sequence.output_length :][: self._random.randint(0, self._most)]
                sequence.draft[:] = [
                    (token + 1) % 200 if self._random.random() < self._wrong else token for token in following
                ]


def answers(events):
    """Tokens, their log-probabilities and how each ended, by handle; and the longest run of one event."""
    found: dict[int, tuple[list[int], list[Any], list[Any]]] = {}
    most = 0
    for event in events:
        assert event.error is None
        tokens, logprobs, ends = found.setdefault(event.handle, ([], [], []))
        tokens += event.token_ids
        logprobs += event.logprobs
        ends += [] if event.finish_reason is None else [event.finish_reason, event.stop_token_id]
        most = max(most, len(event.token_ids))
    return found, most


def play(node, asked, drafting=lambda: None, turn=lambda: None):
    for request in asked:
        node.submit(request)
    events = []
    while node.busy:
        drafting()
        events += node.step()
        turn()
        node.check()
    return answers(events)


def same(found, wanted):
    """To the bit."""
    assert found.keys() == wanted.keys()
    for handle, answer in wanted.items():
        assert found[handle] == answer


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["v3", "qwen3", "qwen3-next"])
@pytest.mark.parametrize("how", ASKED)
def test_tokens_are_those_without_drafts_in_fewer_steps(name, how, tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint(name)), name)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True, **ASKED[how])
    asked = requests(prompts(), params)
    plain = colocated(source, config())
    wanted, one = play(plain, asked)
    assert one == 1
    node = colocated(source, config())
    drafting = Prompter(node._scheduler, {handle: tokens for handle, (tokens, *_) in wanted.items()})
    found, most = play(node, asked, drafting)
    same(found, wanted)
    assert most == 5, "all of a draft of four was right once"
    assert node.stats().steps < plain.stats().steps and node.stats().kv_blocks_used == 0


def test_blocks_are_found_by_the_confirmed_tokens_alone_and_hold_their_keys(tiny_checkpoint, monkeypatch):
    """Drafts that are always wrong at their end fill blocks; none is named after a wrong token, and later requests that
    take the blocks have the tokens of a node that computed them itself."""
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    asked = requests(prompts(), SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True))
    wanted, _ = play(colocated(source, config()), asked)
    node = colocated(source, config())
    published, publish = set(), node.kv.pool.publish

    def noted(block, name):
        published.add(name)
        publish(block, name)

    monkeypatch.setattr(node.kv.pool, "publish", noted)
    play(node, asked, Prompter(node._scheduler, {h: tokens for h, (tokens, *_) in wanted.items()}, wrong=0.5))
    right = set()
    for request in asked:
        tokens, name = [*request.prompt_ids, *wanted[request.handle][0]], node.kv.pool.root
        for end in range(8, len(tokens), 8):
            name = block_hash(name, tokens[end - 8 : end])
            right.add(name)
    assert published == right
    longer = [GenerationRequest(9 + r.handle, (*r.prompt_ids, *wanted[r.handle][0]), r.params) for r in asked]
    again, _ = play(node, longer)
    assert node.stats().prefix_hits > 0
    same(again, play(colocated(source, config()), longer)[0])


def test_drafts_over_expert_nodes_and_in_two_micro_batches(tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    asked = requests(prompts(), SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True))
    wanted, _ = play(colocated(source, config()), asked)
    cluster = LocalCluster.build(source, config(micro_batches=2), experts=2)
    (node,) = cluster.attention
    drafting = Prompter(node._scheduler, {handle: tokens for handle, (tokens, *_) in wanted.items()})
    found, most = play(node, asked, drafting, lambda: [expert.poll() for expert in cluster.experts])
    same(found, wanted)
    assert most > 2


def test_drafts_in_steps_that_are_one_call_over_an_exchange(tiny_checkpoint, monkeypatch):
    """With expert nodes that have threads of their own; where no draft is computed a step has a row a sequence."""
    from tests.engine.test_exchange import World  # which is skipped where there is no native library

    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    asked = requests(prompts(), SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True))
    wanted, _ = play(colocated(source, config()), asked)
    rows, run_stack = [], Ops.run_stack

    def noted(ops, stack, x_TH, *rest):
        rows.append(len(x_TH))
        return run_stack(ops, stack, x_TH, *rest)

    monkeypatch.setattr(Ops, "run_stack", noted)
    world = World(source, config(), experts=2)
    drafting = Prompter(world.node._scheduler, {handle: tokens for handle, (tokens, *_) in wanted.items()})
    with world.serving() as node:
        found, _ = play(node, asked, drafting, lambda: node.wait(0.02) if node.stalled else None)
    world.close()
    same(found, wanted)
    assert max(rows) > len(asked)


@pytest.mark.slow
def test_a_grammar_sees_no_token_that_was_only_supposed():
    """Of the bundled model, drawn: a guide that had taken a wrong token would refuse the right one."""
    source = ModelSource("configs/nano", "nano")
    shape = of_schema(
        {"type": "array", "items": {"type": "integer", "maximum": 9999}, "minItems": 9, "maxItems": 9}
    )
    params = SamplingParams(max_tokens=NEW, temperature=1.0, seed=4, grammar=shape)
    asked = [GenerationRequest(i, prompt, params) for i, prompt in enumerate(prompts((4, 9)))]
    wanted, _ = play(colocated(source, config()), asked)
    node = colocated(source, config())
    found, most = play(
        node, asked, Prompter(node._scheduler, {h: tokens for h, (tokens, *_) in wanted.items()})
    )
    same(found, wanted)
    assert most > 2


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    blocks=st.integers(6, 24),
    rows=st.integers(4, 24),
    new=st.integers(1, 20),
)
def test_any_drafts_in_a_small_cache(seed, lengths, blocks, rows, new):
    """Integers alone: the scheduler with a model that says the next number. A draft preempts nobody, passes no limit,
    and what is computed is what was confirmed."""
    draw = random.Random(seed)
    engine = config(kv_blocks=blocks, block_size=4, max_batch_tokens=rows, max_model_len=40)
    scheduler = Scheduler(engine, 1000, frozenset())
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    asked = [GenerationRequest(i, tuple(range(i * 50, i * 50 + n)), params) for i, n in enumerate(lengths)]
    asked = [one for one in asked if len(one.prompt_ids) < min(40, blocks * 4)]
    for request in asked:
        scheduler.submit(request)
    done = {}
    for _ in range(5000):
        if not scheduler.busy:
            break
        for sequence in scheduler._running:
            last = sequence.tokens[-1]
            sequence.draft[:] = [last + 1 + i + (draw.random() < 0.3) for i in range(draw.randint(0, 6))]
        plan = scheduler.plan(0)
        if plan is None:
            continue
        assert plan.tokens <= rows
        runs = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert chunk.start + chunk.count <= 40 and (chunk.kind is VERIFY or not chunk.supposed)
            assert (chunk.kind is DECODE) <= (chunk.count == 1 and not chunk.supposed)
            if chunk.last:
                right, last = 0, sequence.tokens[-1]
                while right < chunk.supposed and sequence.draft[right] == last + 1 + right:
                    right += 1
                runs.append([last + 1 + i for i in range(right + 1)])
        ended = scheduler.commit(plan, runs)
        assert not any(chunk.sequence.draft for chunk in plan.chunks)
        for one in ended:
            done[one.sequence.request.handle] = one.sequence.output_ids
        for sequence in scheduler._running:
            assert sequence.computed <= len(sequence.tokens)
        scheduler.check()
    assert not scheduler.busy and done.keys() == {one.handle for one in asked}
    for request in asked:
        first = request.prompt_ids[-1] + 1
        most = min(new, min(40, blocks * 4) - len(request.prompt_ids))
        assert done[request.handle] == list(range(first, first + most))
    assert scheduler.pool.used == 0


def test_a_draft_preempts_nobody():
    """Two sequences fill the cache; a draft of one gets what its own last block has room for."""
    scheduler = Scheduler(
        config(kv_blocks=4, block_size=4, max_model_len=16, prefix_caching=False), 99, frozenset()
    )
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    for handle in (1, 2):
        scheduler.submit(GenerationRequest(handle, (1, 2, 3, 4, 5), params))
    plan = scheduler.plan(0)
    assert plan is not None
    scheduler.commit(plan, [[6], [6]])
    first, second = scheduler._running
    first.draft[:] = [7, 8, 9, 10, 11]
    plan = scheduler.plan(0)
    assert plan is not None
    assert [(c.kind, c.count, c.supposed) for c in plan.chunks] == [(VERIFY, 3, 2), (DECODE, 1, 0)]
    assert scheduler.preemptions == 0
    scheduler.commit(plan, [[7, 8, 9], [7]])
    assert first.output_ids == [6, 7, 8, 9] and first.computed == 8 and not first.draft
    assert second.computed == 6
    scheduler.check()


def decoding(engine, count):
    """A scheduler whose sequences, of five tokens and one more, decode."""
    scheduler = Scheduler(engine, 99, frozenset())
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    for handle in range(count):
        scheduler.submit(GenerationRequest(handle, (1, 2, 3, 4, 5 + handle), params))
    while any(not sequence.output_length for sequence in scheduler._running) or scheduler.waiting:
        for micro_batch in range(engine.micro_batches):
            if (plan := scheduler.plan(micro_batch)) is not None:
                scheduler.commit(plan, [[6] for chunk in plan.chunks if chunk.last])
    return scheduler


def test_a_draft_takes_no_block_that_another_of_its_step_needs():
    """Both have filled their blocks, and one block is left, which the second needs for its next token."""
    engine = config(kv_blocks=4, block_size=4, max_model_len=16, micro_batches=1, prefix_caching=False)
    scheduler = decoding(engine, 2)
    first, second = scheduler._running
    for _ in range(2):
        plan = scheduler.plan(0)
        scheduler.commit(plan, [[7], [7]])
    assert [first.computed, second.computed] == [7, 7] and not scheduler.preemptions
    first.draft[:] = [7, 8, 9, 10, 11, 12]
    plan = scheduler.plan(0)
    assert [(c.kind, c.supposed) for c in plan.chunks] == [(DECODE, 0), (DECODE, 0)]
    assert scheduler.preemptions == 0


def test_a_wrong_draft_keeps_no_blocks():
    """Nor does one on its way take those that another micro-batch needs."""
    engine = config(kv_blocks=12, block_size=1, max_model_len=12, micro_batches=1, prefix_caching=False)
    scheduler = decoding(engine, 1)
    (only,) = scheduler._running
    only.draft[:] = [7, 8, 9, 10]
    plan = scheduler.plan(0)
    assert plan.chunks[0].supposed == 4 and scheduler.pool.used == 10
    scheduler.commit(plan, [[1]])
    assert scheduler.pool.used == only.computed == 6
    scheduler.check()
    engine = config(kv_blocks=14, block_size=1, max_model_len=14, micro_batches=2, prefix_caching=False)
    scheduler = decoding(engine, 2)
    first, second = scheduler._running
    first.draft[:] = [7, 8, 9]
    ahead = scheduler.plan(first.micro_batch)
    assert ahead.chunks[0].supposed == 2 and scheduler.pool.available == 1
    behind = scheduler.plan(second.micro_batch)
    assert behind.tokens == 1 and scheduler.preemptions == 0


def test_rows_are_shared_and_nobody_waits_for_a_draft():
    """Five sequences and a prompt, where one sequence's draft has room for all rows."""
    engine = config(kv_blocks=64, block_size=4, max_batch_tokens=16, micro_batches=1, max_model_len=64)
    scheduler = decoding(engine, 5)
    for sequence in scheduler._running:
        sequence.draft[:] = range(16)
    plan = scheduler.plan(0)
    assert [chunk.count for chunk in plan.chunks] == [3, 3, 3, 3, 4]
    scheduler.commit(plan, [[1]] * 5)
    params = SamplingParams(max_tokens=2, temperature=0.0)
    scheduler.submit(GenerationRequest(9, tuple(range(30, 60)), params))
    for index, sequence in enumerate(scheduler._running):
        sequence.draft[:] = range(1 if index else 16)
    plan = scheduler.plan(0)
    *decodes, prompt = plan.chunks
    assert prompt.kind is PROMPT and prompt.count == 9, "a quarter of the 11 rows is left to drafts"
    assert sorted(chunk.supposed for chunk in decodes) == [0, 0, 0, 1, 1]
