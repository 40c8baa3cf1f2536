"""How long who says nothing is waited for: by what is known of the watcher and its host, and of others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.control.membership.events import Dismiss, Said, Ticked, Waited
from afserve.control.membership.recovery import OnLoss, Rules
from afserve.control.membership.silence import HostLoad, SilenceRules, SilenceSigns, patience, stretch
from afserve.control.wire.values import Endpoint, Heartbeat, Ready, Stuck, Unheard
from afserve.engine.stats import AttentionStats, ExpertStats
from afserve.member import Role, attention_life, attention_node, expert_life, expert_node
from tests.control.test_membership import join, run_of, say
from tests.control.test_scaling import served

RULES, QUIET = SilenceRules(), HostLoad()
SHARES = st.floats(0.0, 1.0)
SECONDS = st.floats(0.0, 1e6)
SIGNS = st.builds(
    SilenceSigns,
    late=SECONDS,
    pressure=st.none() | SHARES,
    silent=st.integers(0, 2000),
    watched=st.integers(0, 2000),
    gap=SECONDS,
    last=st.booleans(),
)


@given(st.floats(0.01, 600.0), SIGNS)
def test_nobody_is_given_less_than_on_a_quiet_host_nor_for_ever(limit, signs):
    assert limit <= patience(limit, signs, RULES) <= max(limit, RULES.most)


@given(st.floats(0.01, 600.0))
def test_on_a_quiet_host_it_is_what_was_asked_for(limit):
    for pressure in (None, 0.0, RULES.busy):
        assert patience(limit, SilenceSigns(pressure=pressure, watched=5), RULES) == limit


@given(st.floats(0.01, 50.0), SIGNS, SIGNS)
def test_whatever_speaks_for_it_never_shortens_it(limit, one, other):
    """Of two situations, the one in which more speaks for who is silent."""
    more = SilenceSigns(
        max(one.late, other.late),
        max((p for p in (one.pressure, other.pressure) if p is not None), default=None),
        max(one.silent, other.silent),
        min(one.watched, other.watched),
        max(one.gap, other.gap),
        one.last or other.last,
    )
    assert patience(limit, more, RULES) >= max(patience(limit, signs, RULES) for signs in (one, other))


@given(SECONDS, st.none() | st.floats(-1.0, 5.0))
def test_other_times_are_stretched_within_bounds(late, pressure):
    assert 1.0 <= stretch(late, pressure, RULES) <= RULES.times


@pytest.mark.parametrize(
    ("signs", "least"),
    [
        (SilenceSigns(pressure=1.0), 8.0),
        (SilenceSigns(late=0.5), 6.0),
        (SilenceSigns(silent=2, watched=3), 3.0),
        (SilenceSigns(silent=1, watched=1), 3.0),
        (SilenceSigns(last=True), 10.0),
        (SilenceSigns(gap=2.0), 6.0),
    ],
    ids=["pressure", "late", "several", "both of two", "last", "was silent before"],
)
def test_each_sign_alone_gives_more_time(signs, least):
    assert patience(1.0, signs, RULES) >= least


@pytest.mark.parametrize("signs", [SilenceSigns(silent=1, watched=5), SilenceSigns(silent=0, watched=1)])
def test_who_is_silent_alone_is_not_several(signs):
    assert patience(1.0, signs, RULES) == 1.0


class Cluster:
    """Two attention and two expert nodes that serve; each says a heartbeat every third of a second, but some."""

    def __init__(self, attention=2, **rules):
        self.membership, self.members = served(attention, 2, on_loss=OnLoss.RECOVER, patience=1e6, **rules)
        self.now, self.lost = 0.0, []

    def run(self, seconds, silent=(), load=QUIET, each=1 / 3):
        """Time passes; those that are `silent` say nothing, and others wait for all."""
        end, said = self.now + seconds, self.now - each
        since = dict.fromkeys(silent, self.now)
        while self.now < end and not self.lost:
            self.now += 0.25
            if self.now - said >= each:
                said = self.now
                for node in self.members:
                    if node not in silent:
                        stats = AttentionStats(running=1) if node.role is Role.ATTENTION else ExpertStats()
                        self.on(Said(self.members[node], Heartbeat(1, stats)))
            for node in silent:
                self.wait_for(node, self.now - since[node])
            self.on(Ticked(load))
        return self.lost

    def wait_for(self, node, seconds):
        if node.role is Role.ATTENTION:
            self.on(Waited(Unheard(attention_life(node.index, 0), seconds)))
            return
        asker = next((n for n in self.members if n.role is Role.ATTENTION), node)
        self.on(Said(self.members[asker], Stuck(expert_life(node.index, 0), seconds)))

    def on(self, event):
        self.lost += [e.member.node for e in self.membership.on(event, self.now) if isinstance(e, Dismiss)]


A, B = attention_node(0), expert_node(0)


@pytest.mark.parametrize("node", [A, B], ids=str)
def test_on_a_quiet_host_one_that_stands_still_is_lost_after_the_silence(node):
    cluster = Cluster()
    cluster.run(20.0)
    assert cluster.run(1.75, silent=[node]) == [node]


@pytest.mark.parametrize(
    "load", [HostLoad(pressure=1.0), HostLoad(late=0.7), HostLoad(0.3, 0.9)], ids=["pressure", "late", "both"]
)
@pytest.mark.parametrize("node", [A, B], ids=str)
def test_on_a_host_that_starves_it_comes_back_to_what_it_had(node, load):
    cluster = Cluster()
    cluster.run(5.0, load=load)
    before = cluster.membership.members.last_at(node).id
    for _ in range(5):
        assert cluster.run(3.0, silent=[node], load=load) == []
        cluster.run(1.0, load=load)
    assert cluster.membership.members.last_at(node).id == before
    assert cluster.run(120.0, silent=[node], load=load) == [node], "there is an end to it"


@pytest.mark.parametrize("ready", [False, True])
def test_who_is_not_ready_yet_is_not_slow(ready):
    """It may be compiling kernels."""
    membership = run_of(1, 2, on_loss=OnLoss.RECOVER)
    members = {node: join(membership, node) for node in membership.deployment.nodes}
    for node in members if ready else set(members) - {B}:
        where = Endpoint("a" if node.role is Role.EXPERT else "", {})
        say(membership, members[node], where, Ready(1))
    effects = membership.on(Said(members[A], Stuck(expert_life(0, 0), 3600.0)), 1.0)
    assert any(isinstance(effect, Dismiss) for effect in effects) is ready


def test_the_last_of_its_role_is_waited_for_longer():
    cluster = Cluster(attention=1)
    cluster.run(5.0)
    assert cluster.run(9.0, silent=[A]) == []
    cluster.run(0.5)
    assert cluster.run(60.0, silent=[A]) == [A]


def test_a_false_alarm_raises_the_limit_and_is_forgotten():
    cluster = Cluster(silence=3.0)
    cluster.run(5.0)
    assert cluster.run(2.0, silent=[A]) == []
    cluster.run(1.0)
    assert cluster.run(5.0, silent=[A]) == [], "it was silent before, and came back"
    cluster.run(40.0)
    assert cluster.run(4.0, silent=[A]) == [A]


def test_all_at_once_are_given_more_time_than_one():
    cluster = Cluster(attention=3)
    cluster.run(5.0)
    everyone = list(cluster.members)
    assert cluster.run(2.5, silent=everyone) == []
    assert cluster.run(60.0, silent=everyone)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([A, B]), st.floats(0.3, 7.5), st.floats(0.4, 3.0)), min_size=1, max_size=8
    )
)
@pytest.mark.slow
def test_nobody_who_lives_is_lost_while_everything_waits_for_a_processor(pauses):
    cluster = Cluster()
    cluster.run(2.0, load=HostLoad(0.2, 0.97))
    for node, silent, between in pauses:
        assert cluster.run(silent, silent=[node], load=HostLoad(0.2, 0.97)) == []
        cluster.run(between, load=HostLoad(0.2, 0.97))


def test_a_loss_by_silence_on_a_host_that_starves_is_no_sign_that_the_place_fails():
    cluster = Cluster(attention=2, restarts=0)
    cluster.run(5.0, load=HostLoad(pressure=1.0))
    assert cluster.run(120.0, silent=[A], load=HostLoad(pressure=1.0)) == [A]
    assert not cluster.membership._recovery.is_failing(A)
    cluster = Cluster(attention=2, restarts=0)
    cluster.run(5.0)
    assert cluster.run(5.0, silent=[A]) == [A] and cluster.membership._recovery.is_failing(A)


def test_the_rules_are_said_for_a_quiet_host():
    assert Rules().silence == 1.0 and RULES.last == 10.0 and RULES.most == 60.0
