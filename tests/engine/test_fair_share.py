"""Tenants have their shares of a node's tokens: a flood delays nobody else beyond them, and nothing is forgotten."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.config import EngineConfig
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams, Tenant
from afserve.engine.scheduling.scheduler import Scheduler
from afserve.errors import OverloadedError, RequestError

BUDGET = 64
CONFIG = EngineConfig(
    max_model_len=400,
    kv_blocks=4000,
    block_size=8,
    max_batch_tokens=BUDGET,
    max_sequences=256,
    micro_batches=1,
)


def scheduler(**fields):
    return Scheduler(replace(CONFIG, **fields), 211, frozenset())


class Asked:
    """Requests of tenants with distinct prompts, so that no prefix is shared; when each had its first token."""

    def __init__(self, made):
        self.made, self.handles, self.first, self.step = made, 0, {}, 0

    def submit(self, tenant, length, max_tokens=1, priority=0):
        handle, self.handles = self.handles, self.handles + 1
        prompt = tuple((handle * 31 + at * 7) % 211 for at in range(length))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        salt = str(handle)
        self.made.submit(
            GenerationRequest(handle, prompt, params, priority=priority, cache_salt=salt, tenant=tenant)
        )
        return handle

    def turn(self):
        """One step; the tokens that were computed for each tenant."""
        plan = self.made.plan(0)
        done: dict[str, int] = {}
        self.step += 1
        for chunk in plan.chunks if plan else ():
            name = chunk.sequence.request.tenant.name
            done[name] = done.get(name, 0) + chunk.count
            if chunk.last:
                self.first.setdefault(chunk.sequence.request.handle, self.step)
        if plan:
            self.made.commit(plan, [[3]] * sum(chunk.last for chunk in plan.chunks))
        self.made.check()
        return done


A, B, C = Tenant("a"), Tenant("b", 3), Tenant("c", 2)


def waits(made):
    return {name for name, mine in made._shares._behind.items() if mine}


EVENTS = st.lists(
    st.one_of(st.tuples(st.sampled_from((A, B, C)), st.integers(1, 390)), st.just("step")),
    min_size=5,
    max_size=120,
)


@settings(max_examples=120, deadline=None)
@given(EVENTS)
def test_of_those_who_wait_none_is_ahead_of_another_by_more_than_a_step(events):
    made = scheduler()
    asked = Asked(made)
    for event in events:
        if event == "step":
            asked.turn()
        else:
            asked.submit(*event)
        counts = [made._shares.given(name) for name in waits(made)]
        assert not counts or max(counts) - min(counts) <= BUDGET + 1e-9, "but for the rounding of thirds"


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.integers(1, 6), st.integers(60, 200))
def test_every_request_has_its_turn_and_nothing_is_remembered(events, sequences, blocks):
    """Also where few run at a time, and where they are preempted."""
    made = scheduler(max_sequences=sequences, kv_blocks=blocks)
    asked = Asked(made)
    for event in events:
        if event == "step":
            asked.turn()
        else:
            tenant, length = event
            asked.submit(tenant, length, max_tokens=1 + length % 9)
    for _ in range(5000):
        if not made.busy:
            break
        asked.turn()
    assert not made.busy and len(asked.first) == asked.handles
    assert not (made._shares._given or made._shares._open or made._shares._behind or len(made._waiting))


@settings(max_examples=60, deadline=None)
@given(
    flood=st.lists(st.integers(50, 390), min_size=20, max_size=60),
    later=st.integers(0, 8),
    length=st.integers(1, 390),
    share=st.sampled_from((1, 2, 5)),
)
@pytest.mark.slow
def test_a_flood_delays_another_tenant_by_its_share_only(flood, later, length, share):
    asked = Asked(scheduler())
    for tokens in flood:
        asked.submit(A, tokens)
    for _ in range(later):
        asked.turn()
    before = asked.step
    mine = asked.submit(Tenant("b", share), length)
    while mine not in asked.first:
        asked.turn()
    steps = asked.first[mine] - before
    assert steps <= -(-length * (share + 1) // (share * BUDGET)) + 2


def test_tokens_follow_the_shares():
    asked = Asked(scheduler())
    for _ in range(40):
        asked.submit(A, 300)
        asked.submit(B, 300)
    done = {"a": 0, "b": 0}
    for _ in range(60):
        for name, tokens in asked.turn().items():
            done[name] += tokens
    assert abs(done["b"] / done["a"] - 3) < 0.15


def test_a_priority_comes_before_every_share():
    asked = Asked(scheduler())
    for _ in range(5):
        asked.submit(B, 200)
    first = asked.submit(A, 200, priority=-1)
    second = asked.submit(A, 200, priority=1)
    while second not in asked.first:
        asked.turn()
    assert asked.first[first] <= 4 and asked.first[second] == max(asked.first.values())


def test_nobody_saves_up_turns_while_nothing_of_his_waits():
    asked = Asked(scheduler())
    asked.submit(C, 5, max_tokens=200)  # it decodes all the while
    asked.turn()
    for _ in range(30):
        asked.submit(A, 300)
    for _ in range(40):
        asked.turn()
    done = {"a": 0, "c": 0}
    for _ in range(20):
        asked.submit(C, 300)
    for _ in range(30):
        for name, tokens in asked.turn().items():
            done[name] += tokens
    assert done["a"] > 0.25 * (done["a"] + done["c"])


def test_alone_nothing_is_counted():
    asked = Asked(scheduler())
    asked.submit(A, 390)
    asked.turn()
    assert asked.made._shares.given("a") == 0
    asked.submit(B, 390)
    asked.turn()
    assert asked.made._shares.given("a") + asked.made._shares.given("b") > 0


def test_a_tenant_that_fills_the_queue_keeps_no_other_out():
    asked = Asked(scheduler(max_waiting=8))
    for _ in range(8):
        asked.submit(A, 10)
    with pytest.raises(OverloadedError, match="8 requests are waiting, the limit is 8"):
        asked.submit(A, 10)
    for _ in range(6):
        asked.submit(B, 10)
    with pytest.raises(OverloadedError, match="14 requests are waiting"):
        asked.submit(B, 10)
    asked.submit(C, 10)
    asked.submit(C, 10)
    with pytest.raises(OverloadedError, match="16 requests are waiting"):
        asked.submit(Tenant("d"), 10)
    asked.made.check()


def test_cancelled_requests_leave_nothing():
    asked = Asked(scheduler())
    handles = [asked.submit(tenant, 200) for tenant in (A, B, C) for _ in range(3)]
    asked.turn()
    for handle in handles:
        assert asked.made.cancel(handle)
        asked.made.check()
    assert not asked.made.busy and not asked.made._shares._given and not asked.made._shares._behind


@pytest.mark.parametrize("wrong", [{"share": 0}, {"share": 1001}, {"name": "x" * 98}, {"name": "a\nb"}])
def test_a_tenant_that_is_none(wrong):
    with pytest.raises(RequestError, match=next(iter(wrong)).replace("name", "tenant")):
        Tenant(**wrong)


class Client:
    """`ahead` of its requests are open at a time; it sends the next one when one has ended."""

    def __init__(self, asked, tenant, lengths, ahead):
        self.asked, self.tenant, self.lengths, self.ahead = asked, tenant, lengths, ahead
        self.sent, self.open = 0, set()

    def turn(self):
        self.open -= set(self.asked.first)
        while len(self.open) < self.ahead:
            length = self.lengths[self.sent % len(self.lengths)]
            self.open.add(self.asked.submit(self.tenant, length))
            self.sent += 1


CLIENT = st.tuples(
    st.integers(1, 10),
    st.lists(st.integers(1, 390), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 3),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(CLIENT, min_size=1, max_size=4), st.integers(1, 10))
@pytest.mark.slow
def test_who_comes_and_goes_gets_no_more_than_who_always_waits(clients, share):
    """One floods. The others send a request at a time or a few, some after pauses: each gets at most its share."""
    asked = Asked(scheduler())
    flood = Client(asked, Tenant("flood", share), [390], 12)
    others = [
        (Client(asked, Tenant(f"t{index}", own), lengths, ahead), pause)
        for index, (own, lengths, ahead, pause) in enumerate(clients)
    ]
    done = dict.fromkeys(["flood", *(client.tenant.name for client, _ in others)], 0)
    for step in range(100):
        flood.turn()
        for client, pause in others:
            if client.open - set(asked.first) or step % (pause + 1) == 0:
                client.turn()
        for name, tokens in asked.turn().items():
            done[name] += tokens
    for client, _ in others:
        ahead = done[client.tenant.name] / client.tenant.share - done["flood"] / share
        assert ahead <= 2 * BUDGET


@pytest.mark.slow
def test_short_prompts_one_at_a_time_pay_for_those_before():
    """A tenant without open requests was forgotten, and with it what it had been given: every other step was its."""
    asked = Asked(scheduler())
    flood, one = Client(asked, Tenant("flood", 9), [390], 12), Client(asked, Tenant("one"), [BUDGET], 1)
    done = {"flood": 0, "one": 0}
    for _ in range(200):
        flood.turn()
        one.turn()
        for name, tokens in asked.turn().items():
            done[name] += tokens
    assert 0.07 < done["one"] / sum(done.values()) < 0.13


def test_what_a_tenant_was_given_is_forgotten_once_the_others_have_as_much():
    asked = Asked(scheduler())
    shares = asked.made._shares
    for _ in range(4):
        asked.submit(B, 390)
    asked.submit(A, BUDGET)
    while shares._open["a"]:
        asked.turn()
    assert shares._left == {"a": BUDGET} and shares.several
    while shares._left:
        before = shares.given("b")
        asked.turn()
    assert before < BUDGET <= shares.given("b") and not shares.several and asked.made.busy
    assert asked.submit(A, 390) and shares.given("a") == shares.given("b"), "nothing is owed, nothing saved"
