"""The scheduler alone: a scripted model that takes integers, and integrity after every step."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.config import EngineConfig
from afserve.engine.kv.blocks import ROOT, BlockPool, block_hash
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.scheduler import Scheduler
from afserve.engine.scheduling.step_plan import ChunkKind, StepPlan
from afserve.errors import OverloadedError, RequestError

VOCAB = 50


def scheduler(**fields):
    base = {"max_model_len": 64, "kv_blocks": 12, "block_size": 4, "max_batch_tokens": 8, "micro_batches": 2}
    return Scheduler(EngineConfig(**{**base, **fields}), VOCAB, frozenset({0}))


def request(handle, length=5, **params):
    prompt = tuple(1 + (i * 7) % 40 for i in range(length))
    return GenerationRequest(handle, prompt, SamplingParams(**{"seed": 1, **params}))


def next_token(sequence):
    """A model that depends on the whole history, so that a lost or repeated token shows."""
    return 1 + (sum(sequence.tokens) * 31 + len(sequence.tokens)) % (VOCAB - 1)


def run(s, order=(0, 1), steps=4000):
    out = {}
    for turn in range(steps):
        plan = s.plan(order[turn % len(order)])
        s.check()
        if plan is not None:
            assert plan.tokens <= 8
            before = [(c.sequence, list(c.sequence.tokens)) for c in plan.chunks]
            for done in s.commit(plan, [[next_token(c.sequence)] for c in plan.chunks if c.last]):
                out[done.sequence.request.handle] = (done.reason, done.sequence.output_ids)
            assert all(len(q.tokens) - len(t) <= 1 for q, t in before)
            s.check()
        if not s.busy:
            break
    assert not s.busy
    assert s.pool.used == 0
    return out


def next_run(sequence, count):
    """What the model would say in `count` steps, as a run that was accepted at once."""
    tokens = list(sequence.tokens)
    for _ in range(count):
        tokens.append(1 + (sum(tokens) * 31 + len(tokens)) % (VOCAB - 1))
    return tokens[len(sequence.tokens) :]


def alone(req):
    tokens = list(req.prompt_ids)
    for _ in range(req.params.max_tokens):
        tokens.append(1 + (sum(tokens) * 31 + len(tokens)) % (VOCAB - 1))
    return tokens[len(req.prompt_ids) :]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 14)), min_size=1, max_size=9),
    blocks=st.integers(11, 40),
    micro_batches=st.integers(1, 3),
    caching=st.booleans(),
    budget=st.integers(1, 8),
)
def test_any_load_gives_the_tokens_of_running_alone(lengths, blocks, micro_batches, caching, budget):
    s = scheduler(
        kv_blocks=blocks, micro_batches=micro_batches, prefix_caching=caching, max_batch_tokens=budget
    )
    wanted = [request(i, n, max_tokens=m) for i, (n, m) in enumerate(lengths)]
    for req in wanted:
        s.submit(req)
    out = run(s, order=tuple(range(micro_batches)))
    for req in wanted:
        assert out[req.handle] == ("length", alone(req))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["submit", "plan0", "plan1", "commit", "cancel"]), st.integers(0, 6)))
)
def test_integrity_under_any_order_of_calls(calls):
    s = scheduler(kv_blocks=11)
    plans = {}
    for call, n in calls:
        if call == "submit":
            try:
                s.submit(request(n, 3 + 4 * n, max_tokens=6))
            except RequestError as error:
                assert "already running" in error.message
        elif call == "cancel":
            s.cancel(n)
        elif call.startswith("plan") and int(call[-1]) not in plans:
            plan = s.plan(int(call[-1]))
            if plan is not None:
                plans[plan.micro_batch] = plan
        elif call == "commit" and plans:
            _, plan = plans.popitem()
            s.commit(plan, [[next_token(c.sequence)] for c in plan.chunks if c.last])
        s.check()


def test_decodes_go_before_a_long_prompt():
    s = scheduler(micro_batches=1, kv_blocks=40)
    s.submit(request(1, 2, max_tokens=10))
    s.commit(s.plan(0), [[7]])
    s.submit(request(2, 30, max_tokens=2))
    plan = s.plan(0)
    assert [(c.sequence.request.handle, c.count) for c in plan.chunks] == [(1, 1), (2, 7)]


def test_micro_batches_stay_even_and_inactive_ones_empty():
    s = scheduler(micro_batches=3, kv_blocks=60, max_batch_tokens=64)
    for i in range(9):
        s.submit(request(i, 2, max_tokens=1 if i % 3 == 0 else 30))
    plans = [s.plan(m) for m in range(3)]
    assert [len(p.chunks) for p in plans] == [3, 3, 3]
    for plan in plans:
        s.commit(plan, [[5] for c in plan.chunks if c.last])
    for m in (0, 1, 2, 0, 1, 2):
        plan = s.plan(m)
        s.commit(plan, [[5] for c in plan.chunks if c.last])
    sizes = [len(s.plan(m).chunks) for m in range(3)]
    assert sizes == [2, 2, 2]
    s.check()


def test_fewer_active_micro_batches_take_over():
    s = scheduler(micro_batches=3, kv_blocks=60, max_batch_tokens=64)
    for i in range(6):
        s.submit(request(i, 2, max_tokens=30))
    for m in range(3):
        s.commit(s.plan(m), [[5]] * 2)
    s.active = 1
    assert s.plan(1) is None
    assert s.plan(2) is None
    assert len(s.plan(0).chunks) == 6
    s.check()


def test_stop_conditions():
    s = scheduler(micro_batches=1)
    s.submit(request(1, max_tokens=9))
    (done,) = s.commit(s.plan(0), [[0]])
    assert (done.reason, done.stop_token_id) == ("stop", 0)
    s.submit(request(2, max_tokens=2, ignore_eos=True))
    assert s.commit(s.plan(0), [[0]]) == []
    assert s.commit(s.plan(0), [[3]])[0].reason == "length"
    s.submit(request(3, max_tokens=9, stop_token_ids=(9,), min_tokens=2))
    assert s.commit(s.plan(0), [[9]]) == []
    assert s.commit(s.plan(0), [[9]])[0].stop_token_id == 9


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 14)), min_size=1, max_size=9),
    blocks=st.integers(11, 40),
    budget=st.integers(1, 8),
    dice=st.randoms(use_true_random=False),
)
def test_runs_of_several_tokens_give_the_tokens_of_single_ones(lengths, blocks, budget, dice):
    """Whatever is accepted at once, and wherever max_tokens cuts it. Nothing is computed twice or left out."""
    s = scheduler(kv_blocks=blocks, max_batch_tokens=budget)
    wanted = [request(i, n, max_tokens=m) for i, (n, m) in enumerate(lengths)]
    for req in wanted:
        s.submit(req)
    out, computed = {}, {req.handle: 0 for req in wanted}
    for turn in range(4000):
        plan = s.plan(turn % 2)
        if plan is not None:
            for chunk in plan.chunks:
                assert chunk.start == chunk.sequence.computed
                assert chunk.last == (chunk.start + chunk.count == len(chunk.sequence.tokens))
                computed[chunk.sequence.request.handle] += chunk.count
            runs = [next_run(c.sequence, dice.randint(1, 5)) for c in plan.chunks if c.last]
            for done in s.commit(plan, runs):
                out[done.sequence.request.handle] = (done.reason, done.sequence.output_ids)
        s.check()
        if not s.busy:
            break
    assert out == {req.handle: ("length", alone(req)) for req in wanted}
    assert s.pool.used == 0
    if not s.preemptions and not s.prefix.hits:
        for req in wanted:
            assert computed[req.handle] < len(req.prompt_ids) + req.params.max_tokens


def test_a_run_is_cut_behind_the_token_that_ends_it():
    s = scheduler(micro_batches=1, max_batch_tokens=40)
    for req in (
        request(1, max_tokens=9),
        request(2, max_tokens=3),
        request(3, max_tokens=9, min_tokens=3, stop_token_ids=(9,)),
    ):
        s.submit(req)
    plan = s.plan(0)
    first, second, third = (chunk.sequence for chunk in plan.chunks)
    ended = {d.sequence.request.handle: d for d in s.commit(plan, [[4, 0, 5], [4, 5, 6, 7], [9, 9, 9, 9]])}
    assert {h: (d.reason, d.stop_token_id) for h, d in ended.items()} == {
        1: ("stop", 0), 2: ("length", None), 3: ("stop", 9)
    }  # fmt: skip
    assert (first.output_ids, second.output_ids, third.output_ids) == ([4, 0], [4, 5, 6], [9, 9, 9])
    assert not s.busy and s.pool.used == 0
    s.check()


def test_what_a_verifying_chunk_supposed_wrongly_is_computed_again():
    """Three tokens are supposed behind the newest one and one of them is right: two of four stay computed."""
    s = scheduler(micro_batches=1, kv_blocks=20)
    s.submit(request(1, 4, max_tokens=30))
    s.commit(s.plan(0), [[11]])
    (chunk,) = s.plan(0).chunks
    assert (chunk.kind, chunk.start, chunk.count) == (ChunkKind.DECODE, 4, 1)
    supposing = replace(chunk, count=4, kind=ChunkKind.VERIFY)
    assert s.commit(StepPlan(0, (supposing,)), [[12, 13]]) == []
    assert (chunk.sequence.computed, chunk.sequence.tokens[-2:]) == (6, [12, 13])
    (chunk,) = s.plan(0).chunks
    assert (chunk.kind, chunk.start, chunk.count, chunk.last) == (ChunkKind.DECODE, 6, 1, True)
    s.commit(StepPlan(0, (chunk,)), [[14, 15, 16]])
    (chunk,) = s.plan(0).chunks
    assert (chunk.kind, chunk.start, chunk.count, chunk.last) == (ChunkKind.VERIFY, 7, 3, True)
    s.check()


def test_a_cancelled_run_gives_nothing():
    s = scheduler(micro_batches=1)
    s.submit(request(1, max_tokens=9))
    plan = s.plan(0)
    s.cancel(1)
    (done,) = s.commit(plan, [[4, 5]])
    assert (done.reason, done.sequence.output_ids) == ("cancelled", [])
    assert not s.busy and s.pool.used == 0


def test_a_chunk_says_what_it_computes():
    """A prompt's last token alone in a chunk is a prompt's; so is what a preempted sequence computes again."""
    s = scheduler(micro_batches=1, kv_blocks=40)
    s.submit(request(1, 9, max_tokens=9))
    plan = s.plan(0)
    assert [(c.count, c.kind) for c in plan.chunks] == [(8, "prompt")] and plan.decodes == 0
    s.commit(plan, [])
    plan = s.plan(0)
    assert [(c.count, c.last, c.kind) for c in plan.chunks] == [(1, True, "prompt")] and not plan.decodes
    s.commit(plan, [[5]])
    s.submit(request(2, 1, max_tokens=9))
    s.submit(request(3, 3, max_tokens=9))
    plan = s.plan(0)
    assert [(c.sequence.request.handle, c.kind) for c in plan.chunks] == [
        (1, "decode"),
        (2, "prompt"),
        (3, "prompt"),
    ]
    assert (plan.decodes, plan.tokens) == (1, 5)
    s.commit(plan, [[5], [5], [5]])
    plan = s.plan(0)
    assert plan.decodes == plan.tokens == 3
    s.commit(plan, [[5], [5, 6], [5]])
    plan = s.plan(0)
    assert [c.kind for c in plan.chunks] == ["decode", "decode", "verify"]
    assert [c.sequence.request.handle for c in plan.chunks] == [1, 3, 2] and plan.decodes == plan.tokens
    s.commit(plan, [[5], [5], [5]])
    for sequence in list(s._running):
        s._preempt(sequence)
    assert {c.kind for c in s.plan(0).chunks} == {"prompt"}


@settings(max_examples=40, deadline=None)
@given(
    moves=st.lists(st.integers(0, 12), min_size=1, max_size=4).map(sorted),
    length=st.integers(1, 20),
    budget=st.integers(1, 8),
    caching=st.booleans(),
)
def test_a_request_goes_on_behind_what_it_has_generated(moves, length, budget, caching):
    whole = request(1, length, max_tokens=13)
    said: list[int] = []
    for until in (*moves, 13):
        s = scheduler(micro_batches=1, kv_blocks=20, max_batch_tokens=budget, prefix_caching=caching)
        s.submit(replace(whole, generated=tuple(said)))
        reason = None
        while len(said) < until and reason is None:
            plan = s.plan(0)
            s.check()
            done = s.commit(plan, [[next_token(c.sequence)] for c in plan.chunks if c.last])
            said = plan.chunks[0].sequence.output_ids
            reason = done[0].reason if done else None
    assert (said, reason) == (alone(whole), "length")


def test_what_was_generated_is_checked_and_counts():
    s = scheduler(micro_batches=1)
    for fields, message in [
        ({"max_tokens": 2}, "generated: 2 tokens are there and max_tokens is 2"),
        ({"max_tokens": 9}, "generated token id 77 is outside"),
    ]:
        generated = (3, 77) if fields["max_tokens"] == 9 else (3, 4)
        with pytest.raises(RequestError, match=message):
            s.submit(replace(request(0, **fields), generated=generated))
    with pytest.raises(RequestError, match="the prompt and what was generated have 64 tokens"):
        s.submit(replace(request(0, 40, max_tokens=60), generated=(5,) * 24))
    s.submit(replace(request(1, max_tokens=9, min_tokens=3, stop_token_ids=(9,)), generated=(9,)))
    assert s.commit(s.plan(0), [[9]]) == []
    (done,) = s.commit(s.plan(0), [[9]])
    assert (done.reason, done.sequence.output_ids) == ("stop", [9, 9, 9])
    s.submit(replace(request(2, max_tokens=3), generated=(5, 5)))
    assert s.commit(s.plan(0), [[5]])[0].reason == "length"


def test_refusals():
    s = scheduler(max_waiting=1, kv_blocks=4)
    for bad, message in [
        (request(0, 0), "the prompt is empty"),
        (request(0, 64), "the prompt has 64 tokens; at most 63 fit"),
        (request(0, 20), "the KV cache of a node holds 16"),
        (GenerationRequest(0, (1, 77)), "token id 77 is outside"),
        (GenerationRequest(0, (1,), SamplingParams(stop_token_ids=(99,))), "token id 99 is outside"),
        (GenerationRequest(0, (1,), SamplingParams(temperature=0.5)), "seed: a request that draws"),
    ]:
        with pytest.raises(RequestError, match=message.replace("(", r"\(")):
            s.submit(bad)
    s.submit(request(1))
    with pytest.raises(OverloadedError, match="1 requests are waiting, the limit is 1"):
        s.submit(request(2))
    s.check()


def test_length_is_capped_by_the_model_and_the_cache():
    s = scheduler(max_model_len=10, micro_batches=1)
    s.submit(request(1, 5, max_tokens=100))
    assert len(run(s, order=(0,))[1][1]) == 5
    s = scheduler(kv_blocks=2, micro_batches=1)
    s.submit(request(1, 5, max_tokens=100))
    assert len(run(s, order=(0,))[1][1]) == 3


def test_prefix_of_a_finished_request_is_found_again():
    s = scheduler(micro_batches=1, kv_blocks=20)
    s.submit(request(1, 13, max_tokens=1))
    run(s, order=(0,))
    s.submit(request(2, 13, max_tokens=1))
    plan = s.plan(0)
    assert plan.chunks[0].start == 12
    assert (s.prefix.queries, s.prefix.hits) == (26, 12)


def test_a_shared_block_outlives_one_of_its_holders():
    pool = BlockPool(4, 2)
    (block,) = pool.allocate(1)
    digest = block_hash(ROOT, (1, 2))
    pool.publish(block, digest)
    pool.hold(pool.match([digest]))
    pool.release([block])
    assert pool.used == 1
    pool.release([block])
    assert pool.used == 0
    assert pool.match([digest]) == [block]
    pool.release(pool.allocate(4))
    assert pool.match([digest]) == []
    pool.check([])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])


def test_hashes_depend_on_everything_before():
    assert block_hash(ROOT, (1, 2)) != block_hash(block_hash(ROOT, (0, 0)), (1, 2))
    assert block_hash(ROOT, (1, 2)) != block_hash(ROOT, (2, 1))


def test_a_step_has_few_tokens_of_prompts_where_that_is_asked_for():
    s = scheduler(max_batch_tokens=20, micro_batches=1, kv_blocks=40)
    s.prompt_tokens = 6
    for handle, length in enumerate((5, 14, 9)):
        s.submit(request(handle, length, max_tokens=9))
    steps = []
    for _ in range(6):
        plan = s.plan(0)
        steps.append([(chunk.sequence.request.handle, chunk.count, str(chunk.kind)) for chunk in plan.chunks])
        s.commit(plan, [[3]] * sum(chunk.last for chunk in plan.chunks))
        s.check()
    assert steps[0] == [(0, 5, "prompt"), (1, 1, "prompt")]
    assert steps[1] == [(0, 1, "decode"), (1, 6, "prompt")]
    assert all(sum(count for _, count, kind in step if kind == "prompt") <= 6 for step in steps)
    assert [kind for *_, kind in steps[-1]] == ["decode"] * 3
