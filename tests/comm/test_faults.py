"""Delay, drop, repetition, reordering, death at every step: the same sums or rows with a reason, never a hang."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.placement.placement import Placement
from tests.comm.faults import Faults, FaultyTransport, Killed

PLACEMENT = Placement.contiguous(layers=2, experts=8, nodes=2)


def same_but(why, y_TH, expected_TH):
    """Every row has its sum to the last bit, or NaN where there is a reason."""
    return all(
        torch.isnan(y_H).all() if row in why else torch.equal(y_H, expected_H)
        for row, (y_H, expected_H) in enumerate(zip(y_TH, expected_TH))
    )


def wrapper(make_faults):
    """Every end gets its own faults, by the order in which ends are made: expert nodes first."""
    numbers = itertools.count()
    ends = []

    def wrap(end):
        ends.append(FaultyTransport(end, make_faults(next(numbers))))
        return ends[-1]

    return wrap, ends


@pytest.mark.slow
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


@pytest.mark.slow
@given(seed=st.integers(0, 1000), drop=st.sampled_from([0.1, 0.5, 1.0]))
@settings(max_examples=30, deadline=None)
def test_a_dropped_message_is_given_up_by_its_deadline(open_cluster, seed, drop):
    wrap, ends = wrapper(lambda n: Faults(seed=100 * seed + n, drop=drop))
    cluster = open_cluster("local", 1, PLACEMENT, options={"wrap": wrap, "deadline": 0.5})
    link = cluster.links[0]
    for turn in range(6):
        batch = cluster.rows(4, seed + turn)
        before = sum(end.dropped for end in ends)
        ticket = link.dispatch(*batch, layer=turn % 2, micro_batch=turn % 2)
        y_TH = cluster.finish(link, ticket, seconds=0.01)
        why = link.take_given_up(turn % 2)
        dropped = sum(end.dropped for end in ends) > before
        assert dropped == bool(why) and same_but(why, y_TH, cluster.expected(turn % 2, *batch))
        assert all("did not answer for expert" in reason for reason in why.values())
    cluster.close()


def drive(cluster, killed):
    """Rounds of both attention nodes; which were killed, and why rows have no sum. A killed end stops being driven."""
    outcomes, given_up = {}, {}
    for turn in range(2):
        flying = []
        for a, link in enumerate(cluster.links):
            if a in outcomes:
                continue
            batch = cluster.rows(4, 10 * a + turn)
            try:
                flying.append((a, batch, link.dispatch(*batch, layer=turn, micro_batch=0)))
            except Killed as error:
                outcomes[a] = error
        for _ in range(100):
            for a, batch, ticket in list(flying):
                try:
                    cluster.links[a].wait([ticket], 0.0)
                    if not cluster.links[a].ready(ticket):
                        continue
                    y_TH, why = cluster.links[a].combine(ticket), cluster.links[a].take_given_up(0)
                    assert same_but(why, y_TH, cluster.expected(turn, *batch))
                    given_up.setdefault(a, []).extend(why.values())
                except Killed as error:
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
    return outcomes, given_up


@pytest.mark.parametrize("kill_at", range(14))
@pytest.mark.parametrize("victim", ["expert", "attention"])
def test_a_peer_killed_at_every_step(build_cluster, victim, kill_at):
    which = 1 if victim == "expert" else 3  # ends are made in the order expert 0, 1, attention 0, 1
    wrap, _ = wrapper(lambda n: Faults(kill_at=kill_at if n == which else None))
    cluster = build_cluster("local", 2, PLACEMENT, options={"wrap": wrap, "deadline": 0.5})
    killed = set()
    outcomes, given_up = drive(cluster, killed)
    if victim == "attention":
        assert not killed, "an attention node's death reached an expert node"
        assert 0 not in outcomes, "an attention node's death reached the other one"
        assert all(isinstance(error, Killed) for error in outcomes.values())
        assert not any(given_up.values())
    else:
        assert killed <= {1} and not outcomes
        for why in itertools.chain(*given_up.values()):
            assert "expert-1: it has closed its transport" in why
        assert killed or not any(given_up.values())
