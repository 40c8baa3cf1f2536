"""The scheduler alone: a scripted model that takes integers, and integrity after every step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.config import EngineConfig
from afserve.engine.blocks import ROOT, BlockPool, block_hash
from afserve.engine.request import GenerationRequest, SamplingParams
from afserve.engine.scheduler import Scheduler
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
            for done in s.commit(plan, [next_token(c.sequence) for c in plan.chunks if c.last]):
                out[done.sequence.request.handle] = (done.reason, done.sequence.output_ids)
            assert all(len(q.tokens) - len(t) <= 1 for q, t in before)
            s.check()
        if not s.busy:
            break
    assert not s.busy
    assert s.pool.used == 0
    return out


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
            s.commit(plan, [next_token(c.sequence) for c in plan.chunks if c.last])
        s.check()


def test_decodes_go_before_a_long_prompt():
    s = scheduler(micro_batches=1, kv_blocks=40)
    s.submit(request(1, 2, max_tokens=10))
    s.commit(s.plan(0), [7])
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
        s.commit(plan, [5 for c in plan.chunks if c.last])
    for m in (0, 1, 2, 0, 1, 2):
        plan = s.plan(m)
        s.commit(plan, [5 for c in plan.chunks if c.last])
    sizes = [len(s.plan(m).chunks) for m in range(3)]
    assert sizes == [2, 2, 2]
    s.check()


def test_fewer_active_micro_batches_take_over():
    s = scheduler(micro_batches=3, kv_blocks=60, max_batch_tokens=64)
    for i in range(6):
        s.submit(request(i, 2, max_tokens=30))
    for m in range(3):
        s.commit(s.plan(m), [5] * 2)
    s.active = 1
    assert s.plan(1) is None
    assert s.plan(2) is None
    assert len(s.plan(0).chunks) == 6
    s.check()


def test_stop_conditions():
    s = scheduler(micro_batches=1)
    s.submit(request(1, max_tokens=9))
    (done,) = s.commit(s.plan(0), [0])
    assert (done.reason, done.stop_token_id) == ("stop", 0)
    s.submit(request(2, max_tokens=2, ignore_eos=True))
    assert s.commit(s.plan(0), [0]) == []
    assert s.commit(s.plan(0), [3])[0].reason == "length"
    s.submit(request(3, max_tokens=9, stop_token_ids=(9,), min_tokens=2))
    assert s.commit(s.plan(0), [9]) == []
    assert s.commit(s.plan(0), [9])[0].stop_token_id == 9


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
    assert (s.prefix_queries, s.prefix_hits) == (26, 12)


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
