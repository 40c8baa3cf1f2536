"""The first placement of a run with copies, how many slots it needs, and how many copies a placement has."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.errors import ConfigError
from afserve.placement.optimizer.problem import Nodes
from afserve.placement.placement import FREE, Placement
from afserve.placement.rebalance.copies import copied, copies_in_words, least_slots


@given(st.integers(1, 40), st.integers(1, 4), st.lists(st.integers(0, 3), min_size=4, max_size=9))
@settings(max_examples=150, deadline=None)
def test_the_least_slots_hold_every_copy_on_hosts_of_its_own(experts, copies, host):
    slots = least_slots(experts, copies, len(host), host)
    nodes = Nodes((slots,) * len(host), host=tuple(host))
    placement = copied(layers=2, experts=experts, copies=copies, nodes=nodes, slots_per_node=slots + 2)
    assert placement.slots_per_node() == slots + 2
    apart = len(set(host)) >= copies
    for layer in placement.layers:
        assert all(sum(e != FREE for e in row) <= slots for row in layer.slots)
        for expert in range(experts):
            found = [n for n, _, _ in layer.replicas(expert)]
            assert len(found) == copies or (apart and len(found) > copies)
            assert not apart or len({host[n] for n in found}) == copies
    assert slots == 1 or copies * experts > (slots - 1) * len(host) or apart


def test_each_node_shares_its_experts_with_many_others():
    nodes = Nodes((16,) * 8)
    (layer,) = copied(layers=1, experts=64, copies=2, nodes=nodes, slots_per_node=16).layers
    others = [{n for e in row for n, _, _ in layer.replicas(e)} - {me} for me, row in enumerate(layer.slots)]
    assert min(map(len, others)) >= 5


def test_copies_that_do_not_fit_are_refused():
    with pytest.raises(
        ConfigError, match="2 copies of 8 experts need 16 slots per layer, not 12 on 3 live nodes"
    ):
        copied(layers=1, experts=8, copies=2, nodes=Nodes((4,) * 3), slots_per_node=4)


def test_copies_in_words():
    once = Placement.contiguous(layers=2, experts=6, nodes=3)
    assert copies_in_words(once) == "6 of 6 experts of a layer have one copy only"
    nodes = Nodes((6,) * 4, host=(0, 0, 1, 1))
    twice = copied(layers=2, experts=6, copies=2, nodes=nodes, slots_per_node=6)
    assert copies_in_words(twice) == "every expert has 2 copies"
    assert copies_in_words(twice, (0, 0, 1, 1)) == "every expert has 2 copies, on different hosts"
    first, second, *_ = sorted(n for n, _, _ in twice.layers[0].replicas(0))
    host = np.arange(4)
    host[second] = host[first]
    said = copies_in_words(twice, host.tolist())
    assert said.startswith("every expert has 2 copies, ") and said.endswith(
        "of 6 experts of a layer on one host only"
    )
