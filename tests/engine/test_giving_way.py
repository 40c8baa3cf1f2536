"""Long answers of a tenant that is ahead make room for others: how soon, how often, for whom, and with which tokens."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.config import EngineConfig
from afserve.engine.scheduling import giving_way, scheduler
from afserve.engine.scheduling.giving_way import AHEAD, FAR, MADE
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams, Tenant
from afserve.engine.scheduling.scheduler import Scheduler

PROMPT, VOCAB = 40, 211
CONFIG = EngineConfig(
    max_model_len=4000,
    kv_blocks=1800,
    block_size=16,
    max_batch_tokens=256,
    max_sequences=4,
    micro_batches=1,
)


def next_run(tokens, count):
    """A model that depends on the whole history, so that a lost or repeated token shows."""
    tokens, known = list(tokens), len(tokens)
    total = sum(tokens)
    for _ in range(count):
        tokens.append(1 + (total * 31 + len(tokens)) % (VOCAB - 1))
        total += tokens[-1]
    return tokens[known:]


@dataclass
class Node:
    """A scheduler with a scripted model. `said` counts the tokens of each tenant, `output` has those of each request
    that ended, `first` is the step of each one's first."""

    made: Scheduler
    runs: int = 1
    step: int = 0
    came: dict = field(default_factory=dict)
    first: dict = field(default_factory=dict)
    output: dict = field(default_factory=dict)
    said: dict = field(default_factory=dict)
    open: dict = field(default_factory=dict)
    gave: dict = field(default_factory=dict)
    plans: list = field(default_factory=list)
    flying: dict = field(default_factory=dict)

    @classmethod
    def of(cls, runs=1, **fields):
        return cls(Scheduler(replace(CONFIG, **fields), VOCAB, frozenset()), runs)

    def submit(self, tenant, answer, length=PROMPT, priority=0):
        handle = len(self.came)
        prompt = tuple(1 + (handle * 31 + at * 7) % (VOCAB - 1) for at in range(length))
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        self.made.submit(
            GenerationRequest(
                handle, prompt, params, priority=priority, cache_salt=str(handle), tenant=tenant
            )
        )
        self.came[handle] = self.step
        self.open[tenant.name] = self.open.get(tenant.name, 0) + 1
        return handle

    def turn(self):
        """One micro-batch's step comes back and its next one begins, while another one's may be under way."""
        self.step += 1
        index = self.step % self.made.active
        self._commit(self.flying.pop(index, None))
        plan = self.made.plan(index)
        if self.step % 16 == 0:
            self.made.check()
        self.plans.append(plan and [(c.sequence.request.handle, c.start, c.count) for c in plan.chunks])
        if plan is not None:
            self.flying[index] = plan
        assert all(c.sequence.micro_batch >= 0 for one in self.flying.values() for c in one.chunks)

    def _commit(self, plan):
        if plan is None:
            return
        last = [chunk.sequence for chunk in plan.chunks if chunk.last]
        for sequence in last:
            name = sequence.request.tenant.name
            self.said[name] = self.said.get(name, 0) + 1
            self.first.setdefault(sequence.request.handle, self.step)
        runs = [next_run(s.tokens, self.runs + 2 * (s.request.tenant.name == "fast")) for s in last]
        for done in self.made.commit(plan, runs):
            request = done.sequence.request
            self.output[request.handle] = done.sequence.output_ids
            self.gave[request.handle] = done.sequence.preemptions
            self.open[request.tenant.name] -= 1

    def flood(self, tenant, answer, most, length=PROMPT):
        while self.open.get(tenant.name, 0) < most:
            self.submit(tenant, answer, length)


A, B, C = Tenant("a"), Tenant("b", 3), Tenant("c", 2)
PLACES = st.integers(1, 6)
REQUEST = st.tuples(
    st.sampled_from((A, B, C)), st.integers(1, 300), st.integers(1, 60), st.sampled_from((-1, 0, 0, 0, 1))
)
EVENTS = st.lists(st.one_of(REQUEST, st.integers(1, 150)), min_size=3, max_size=25)


def play(node, events):
    for event in events:
        if isinstance(event, int):
            for _ in range(event):
                node.turn()
        else:
            node.submit(*event)
    for _ in range(30_000):
        if not node.made.busy:
            break
        node.turn()
    assert not node.made.busy and len(node.output) == len(node.came)
    assert not node.made.pool.used


@settings(max_examples=60, deadline=None)
@given(EVENTS, PLACES, st.integers(1, 2), st.integers(24, 120), st.integers(1, 3), st.booleans())
@pytest.mark.slow
def test_tokens_are_those_of_running_alone_and_nobody_leaves_too_often(
    events, places, micro_batches, blocks, runs, often
):
    """Also where blocks are few, so that sequences leave for room too, and where they leave after few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        if often:
            patch.setattr(giving_way, "AHEAD", 8)
            patch.setattr(giving_way, "MADE", 3)
            patch.setattr(giving_way, "AGAIN", 1000)
        node = Node.of(runs, max_sequences=places, micro_batches=micro_batches, kv_blocks=blocks)
        play(node, events)
    asked = [event for event in events if not isinstance(event, int)]
    for handle, (_, answer, length, _) in enumerate(asked):
        prompt = [1 + (handle * 31 + at * 7) % (VOCAB - 1) for at in range(length)]
        assert node.output[handle] == next_run(prompt, answer)


@settings(max_examples=60, deadline=None)
@given(EVENTS, PLACES, st.integers(1, 2))
@pytest.mark.slow
def test_a_sequence_makes_tokens_between_leaving(events, places, micro_batches):
    """With blocks enough none leaves but for a tenant that is behind; here also one that is hardly behind."""
    node = Node.of(max_sequences=places, micro_batches=micro_batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(giving_way, "AHEAD", 2)
        patch.setattr(giving_way, "AGAIN", 1000)
        play(node, events)
    assert all(left * MADE <= len(node.output[handle]) for handle, left in node.gave.items())
    assert node.made.preemptions == sum(node.gave.values())


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    places=PLACES,
    share=st.integers(1, 5),
    own=st.integers(1, 5),
    later=st.integers(0, 300),
    length=st.integers(1, 400),
)
def test_who_is_behind_has_a_place_within_so_many_steps(places, share, own, later, length):
    """Of a flood of endless answers, one has given its place when the flood is ahead and has made its tokens."""
    node, flood, mine = Node.of(max_sequences=places), Tenant("flood", share), Tenant("mine", own)
    for _ in range(later + 1):
        node.flood(flood, 3900, places + 2)
        node.turn()
    handle = node.submit(mine, 8, length)
    while handle not in node.first and node.step < 5000:
        node.turn()
    assert handle in node.first
    # The flood's sequences have at most so many tokens when the last one of them counts.
    tokens = PROMPT + later + AHEAD + MADE + 2 * places
    ahead = max(AHEAD, tokens // giving_way.AGAIN)
    prompts = -(-(places * PROMPT + length) // CONFIG.max_batch_tokens)
    assert node.first[handle] - node.came[handle] <= max(-(-ahead // places), MADE) + prompts + places + 3


@settings(max_examples=8, deadline=None)
@given(
    places=PLACES,
    tenants=st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from((30, 200, 900, 3500))), min_size=2, max_size=4
    ),
    runs=st.integers(1, 3),
    apart=st.integers(0, 200),
)
@pytest.mark.slow
def test_none_of_those_who_always_wait_is_ahead_without_end(places, tenants, runs, apart):
    """However long the run: between any two it stays below what a bounded number of tokens is worth."""
    node = Node.of(runs, max_sequences=places)
    names = [(Tenant(f"t{index}", share), answer) for index, (share, answer) in enumerate(tenants)]
    for step in range(1500):
        for index, (tenant, answer) in enumerate(names):
            if step >= index * apart:
                node.flood(tenant, answer, places + 2)
        node.turn()
    given = node.made._shares.given
    least = FAR * max(AHEAD, CONFIG.max_model_len // giving_way.AGAIN) + places * (MADE + PROMPT)
    for one, _ in names:
        for other, _ in names:
            assert (given(one.name) - given(other.name)) * one.share <= least


@pytest.mark.by_day(1)
@pytest.mark.parametrize("places", [1, 3, 4, 16])
@pytest.mark.parametrize("shares", [(1, 1), (1, 3), (5, 2), (1, 1, 2)])
@pytest.mark.slow
def test_tokens_of_long_answers_follow_the_shares(places, shares):
    node = Node.of(max_sequences=places, kv_blocks=5000)
    tenants = [Tenant(f"t{index}", share) for index, share in enumerate(shares)]
    for _ in range(400 + 8000 // places):
        for tenant in tenants:
            node.flood(tenant, 3900, places + 2)
        node.turn()
    total, parts = sum(node.said.values()), sum(shares)
    for tenant in tenants:
        assert abs(node.said[tenant.name] / total - tenant.share / parts) < 0.09
    assert node.made.preemptions * AHEAD <= total


@pytest.mark.slow
def test_who_makes_more_tokens_in_a_place_has_fewer_places():
    node = Node.of(max_sequences=2, max_model_len=40_000, kv_blocks=5000)
    for step in range(6000):
        for tenant in (Tenant("fast"), Tenant("slow")):
            node.flood(tenant, 39_000, 3)
        if step == 2000:
            before = {name: node.made._shares.given(name) for name in ("fast", "slow")}
        node.turn()
    fast, slow = (node.made._shares.given(name) - before[name] for name in ("fast", "slow"))
    assert abs(fast / slow - 1) < 0.3


@pytest.mark.slow
def test_tokens_of_long_answers_follow_the_shares_where_blocks_are_few():
    """Two of eight places have room. Nobody leaves so often that few tokens are new ones."""
    node = Node.of(max_sequences=8, kv_blocks=300)
    for step in range(9500):
        node.flood(A, 3000, 8)
        if step == 500:
            before = node.said["a"]
        if step >= 500:
            node.flood(Tenant("b"), 3000, 8)
        node.turn()
    assert abs(node.said["b"] / (node.said["a"] - before) - 1) < 0.15
    computed = sum(count for plan in node.plans if plan for _, _, count in plan)
    assert computed < 5 * sum(node.said.values())


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(EVENTS, PLACES, st.integers(1, 2), st.integers(24, 120))
def test_with_one_tenant_every_step_is_what_it_was(events, places, micro_batches, blocks):
    events = [event if isinstance(event, int) else (A, *event[1:]) for event in events]
    fields = {"max_sequences": places, "micro_batches": micro_batches, "kv_blocks": blocks}
    node, plain = Node.of(**fields), Node.of(**fields)
    play(node, events)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "gives_way", lambda *_: None)
        play(plain, events)
    assert node.plans == plain.plans


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(EVENTS)
def test_with_places_and_room_for_all_nobody_leaves(events):
    node = Node.of(max_sequences=64)
    play(node, events)
    assert not node.made.preemptions


@pytest.mark.slow
@pytest.mark.parametrize(("running", "waiting", "leaves"), [(0, 1, False), (0, 0, True), (1, 0, True)])
def test_none_leaves_for_a_lower_priority(running, waiting, leaves):
    node = Node.of(max_sequences=2)
    for _ in range(2):
        node.submit(A, 1500, priority=running)
    node.turn()
    mine = node.submit(B, 8, priority=waiting)
    for _ in range(1000):
        node.turn()
    assert (mine in node.first) == leaves and bool(node.made.preemptions) == leaves


def test_the_lowest_priority_leaves_first_then_the_least_to_compute_again():
    node = Node.of(max_sequences=3)
    batch, elder = node.submit(A, 3000, length=300, priority=5), node.submit(A, 3000, length=200)
    young = node.submit(A, 3000)
    for _ in range(MADE + 9):
        node.turn()
    for _ in range(2):
        node.submit(Tenant("b", 2), 3000)
    left = []
    for count in (1, 2):
        while node.made.preemptions < count:
            node.turn()
        left.append([node.made.open[handle].preemptions for handle in (batch, elder, young)])
    assert left == [[1, 0, 0], [1, 0, 1]]


@pytest.mark.slow
def test_what_a_preemption_took_counts_once():
    """Else a tenant would pay with its share for having made room."""
    node = Node.of(max_sequences=1, prefix_caching=False)
    node.submit(A, 3000)
    node.turn()
    node.submit(Tenant("b"), 3000)
    for _ in range(3):
        node.turn()
    given, said = node.made._shares.given("a"), node.said["a"]
    while node.made.preemptions < 4:
        node.turn()
    assert node.said["a"] - said > 500
    assert abs(node.made._shares.given("a") - given - (node.said["a"] - said)) <= 2


@pytest.mark.slow
def test_one_leaves_at_a_time():
    node = Node.of(max_sequences=8)
    for _ in range(300):
        node.flood(A, 3900, 10)
        node.turn()
    before, most = 0, 0
    for _ in range(600):
        node.flood(A, 3900, 10)
        node.flood(B, 3900, 10)
        node.turn()
        most, before = max(most, node.made.preemptions - before), node.made.preemptions
    assert before >= 5 and most == 1
