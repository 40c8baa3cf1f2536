"""Lists of members: always what a look at all of them finds, and made anew only where something has changed."""

from random import Random

import pytest

from afserve.control.membership.roster import Member, Roster, State
from afserve.member import MODEL_ROLES, Life, NodeId, Role, attention_node, expert_node


def life(node, generation=0):
    return Member(Life(node, generation), 1, "host", 0.0)


def test_lists_stay_until_something_changes():
    roster = Roster([attention_node(0), expert_node(0)])
    attention = life(attention_node(0))
    roster.put_member(attention.node, attention)
    before, experts = roster.view_of(Role.ATTENTION), roster.view_of(Role.EXPERT)
    assert before.vacancies == () and not before.serving
    roster.set_state(attention, State.LOADING)
    roster.locate(attention, "")
    roster.locate(attention, "")
    assert roster.view_of(Role.ATTENTION).version == before.version + 1  # the address came, once
    roster.set_state(attention, State.READY)
    assert roster.view_of(Role.ATTENTION).serving_indices == {0} and roster.view_of(Role.EXPERT) is experts
    with pytest.raises(AttributeError):
        attention.state = State.GONE


@pytest.mark.parametrize("seed", range(20))
def test_lists_are_what_a_look_at_all_finds(seed):
    random, roster = Random(seed), Roster([])
    known: dict[NodeId, Member | None] = {}
    for turn in range(200):
        node = NodeId(random.choice(MODEL_ROLES), random.randrange(12))
        member = known.get(node)
        match random.randrange(5):
            case 0:
                known[node] = random.choice((None, life(node, turn)))
                roster.put_member(node, known[node])
            case 1:
                known.pop(node, None)
                roster.remove_place(node)
            case _ if member is not None:
                roster.set_state(member, random.choice(list(State)))
        for role in random.sample(MODEL_ROLES, random.randrange(3)):
            places = sorted(place for place in known if place.role is role)
            here = [m for place in places if (m := known[place]) is not None and m.alive]
            view = roster.view_of(role)
            assert view.places == tuple(places) and view.members == tuple(here)
            occupied = {m.node for m in here}
            assert view.vacancies == tuple(place for place in places if place not in occupied)
            assert view.unready == tuple(m for m in here if m.state is not State.READY)
            assert view.serving == tuple(m for m in here if m.serving)
            assert view.serving_indices == {m.node.index for m in view.serving}
