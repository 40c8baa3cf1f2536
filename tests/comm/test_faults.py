"""Delay, drop, repetition, reordering, death at every step: the same sums or a named error, never a hang."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.comm.faults import Faults, FaultyTransport, Killed
from afserve.errors import DeadlineError, PeerLost
from afserve.member import expert_node
from afserve.placement.placement import Placement

PLACEMENT = Placement.contiguous(layers=2, experts=8, nodes=2)


def wrapper(make_faults):
    """Every end gets its own faults, by the order in which ends are made: expert nodes first."""
    numbers = itertools.count()
    ends = []

    def wrap(end):
        ends.append(FaultyTransport(end, make_faults(next(numbers))))
        return ends[-1]

    return wrap, ends


@given(seed=st.integers(0, 1000), delay=st.integers(0, 5), repeat=st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=30, deadline=None)
def test_delayed_repeated_and_reordered_messages_give_the_same_sums(open_cluster, seed, delay, repeat):
    wrap, _ = wrapper(lambda n: Faults(seed=100 * seed + n, delay=delay, repeat=repeat))
    cluster = open_cluster("local", 2, PLACEMENT, options={"wrap": wrap})
    for turn in range(4):
        flying = []
        for a, m in itertools.product(range(2), range(2)):
            batch = cluster.rows(1 + (seed + a + m) % 6, seed + turn)
            flying.append((a, batch, cluster.links[a].dispatch(*batch, layer=turn % 2, micro_batch=m)))
        for a, batch, ticket in flying:
            y_TH = cluster.finish(cluster.links[a], ticket)
            assert torch.equal(y_TH, cluster.expected(turn % 2, *batch))
    cluster.close()


@given(seed=st.integers(0, 1000), drop=st.sampled_from([0.1, 0.5, 1.0]))
@settings(max_examples=30, deadline=None)
def test_a_dropped_message_is_a_named_deadline(open_cluster, seed, drop):
    wrap, ends = wrapper(lambda n: Faults(seed=100 * seed + n, drop=drop))
    cluster = open_cluster("local", 1, PLACEMENT, options={"wrap": wrap, "deadline": 0.5})
    link = cluster.links[0]
    for turn in range(6):
        batch = cluster.rows(4, seed + turn)
        ticket = link.dispatch(*batch, layer=turn % 2, micro_batch=turn % 2)
        try:
            y_TH = cluster.finish(link, ticket, seconds=0.01)
        except DeadlineError as error:
            assert "expert-" in error.message and sum(end.dropped for end in ends)
            break
        assert torch.equal(y_TH, cluster.expected(turn % 2, *batch))
    else:
        assert not any(end.dropped for end in ends)
    cluster.close()


def drive(cluster, killed):
    """Rounds of both attention nodes; which of them ended how. A killed end stops being driven."""
    outcomes = {}
    for turn in range(2):
        flying = []
        for a, link in enumerate(cluster.links):
            if a in outcomes:
                continue
            batch = cluster.rows(4, 10 * a + turn)
            try:
                flying.append((a, batch, link.dispatch(*batch, layer=turn, micro_batch=0)))
            except (Killed, PeerLost) as error:
                outcomes[a] = error
        for _ in range(100):
            for a, batch, ticket in list(flying):
                try:
                    cluster.links[a].wait([ticket], 0.0)
                    if not cluster.links[a].ready(ticket):
                        continue
                    assert torch.equal(cluster.links[a].combine(ticket), cluster.expected(turn, *batch))
                except (Killed, PeerLost, DeadlineError) as error:
                    outcomes[a] = error
                flying = [item for item in flying if item[0] != a]
            for number, node in enumerate(cluster.nodes):
                try:
                    if number not in killed:
                        node.poll()
                        node.wait(0.0)
                except Killed:
                    killed.add(number)
            cluster.clock.advance(0.01)
        assert not flying, "a hang"
    return outcomes


@pytest.mark.parametrize("kill_at", range(14))
@pytest.mark.parametrize("victim", ["expert", "attention"])
def test_a_peer_killed_at_every_step(build_cluster, victim, kill_at):
    which = 1 if victim == "expert" else 3  # ends are made in the order expert 0, 1, attention 0, 1
    wrap, _ = wrapper(lambda n: Faults(kill_at=kill_at if n == which else None))
    cluster = build_cluster("local", 2, PLACEMENT, options={"wrap": wrap, "deadline": 0.5})
    killed = set()
    outcomes = drive(cluster, killed)
    if victim == "attention":
        assert not killed, "an attention node's death reached an expert node"
        assert 0 not in outcomes, "an attention node's death reached the other one"
        assert all(isinstance(error, Killed) for error in outcomes.values())
    else:
        assert killed <= {1}
        for error in outcomes.values():
            assert isinstance(error, PeerLost) and error.peer == expert_node(1)
        if not killed:
            assert not outcomes
