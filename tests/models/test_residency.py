"""Which experts are in memory, and whether traffic has a hot set: against plain models of both, by random uses."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.models.tier.hot_set import HotSet
from afserve.models.tier.residency import Residency

STEPS = st.lists(st.tuples(st.integers(0, 11), st.booleans(), st.integers(0, 2)), max_size=120)


@given(places=st.integers(1, 6), steps=STEPS)
def test_no_place_has_two_slots_and_no_pinned_slot_leaves(places, steps):
    layer, pinned, used = Residency(places), [], []  # of what is in memory, the one used longest ago first
    for slot, pin, unpin in steps:
        for _ in range(min(unpin, len(pinned))):
            layer.unpin(pinned.pop(0))
        if slot in layer:
            layer.use(slot)
            used.remove(slot)
        else:
            free = [one for one in used if one not in pinned]
            admitted = layer.admit(slot)
            assert (admitted is None) == (len(used) == places and not free)
            if admitted is None:
                continue
            assert admitted.evicted == (free[0] if len(used) == places else None)
            if admitted.evicted is not None:
                used.remove(admitted.evicted)
        used.append(slot)
        if pin:
            layer.pin(slot)
            pinned.append(slot)
        held = layer.place_of
        assert list(held) == used and set(pinned) <= set(held)
        assert len(set(held.values())) == len(held) <= places
        assert all(0 <= place < places for place in held.values())


def test_a_call_through_more_slots_than_places_keeps_what_it_comes_to_next():
    layer = Residency(3)
    for slot in (0, 1, 2):
        layer.admit(slot)
    layer.use(0)  # done with
    assert layer.admit(3, keep={0, 1, 2, 3}).evicted == 0
    assert layer.admit(4, keep={1, 2, 3, 4}, strictly=True) is None
    assert layer.admit(4, keep={3}).evicted == 1


def test_a_dropped_slot_gives_its_place_back():
    layer = Residency(1)
    place = layer.admit(5).place
    layer.pin(5)
    assert layer.admit(6) is None
    layer.drop(5)
    assert layer.admit(6) == (place, None) and 5 not in layer


@given(slots=st.integers(1, 40), uses=st.lists(st.integers(0, 39), max_size=200))
def test_shares_are_the_hits_of_a_memory_of_that_size(slots, uses):
    """A least-recently-used memory that begins with the first slots, played beside it."""
    found = HotSet(range(slots))
    sizes = [max(1, round(share * slots)) for share in (0.10, 0.25, 0.50)]
    memories, hits = [list(range(slots)) for _ in sizes], [0, 0, 0]
    for slot in uses:
        slot %= slots
        found.use(slot)
        for at, size in enumerate(sizes):
            hits[at] += slot in memories[at][:size]
            memories[at].remove(slot)
            memories[at].insert(0, slot)
    assert found.served == tuple(hits) and found.uses == len(uses)


def test_a_slot_that_nobody_named_before_was_used_longest_ago():
    found = HotSet(range(2))
    found.use(9)
    found.use(9)
    assert (found.uses, found.served) == (2, (1, 1, 1))


@pytest.mark.parametrize(("skew", "at_10"), [(1.6, 0.5), (0.0, 0.13)])
def test_skewed_traffic_has_a_hot_set_and_even_traffic_has_none(skew, at_10):
    draw, found = random.Random(3), HotSet(range(100))
    weights = [1 / (1 + at) ** skew for at in range(100)]
    for slot in draw.choices(range(100), weights, k=5000):
        found.use(slot)
    share = found.served[0] / found.uses
    assert share > at_10 if skew else share < at_10
