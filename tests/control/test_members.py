"""The controller's table, the lanes of open requests, and who gets a request: pure values."""

import asyncio

import pytest

from afserve.control.membership.members import Members
from afserve.control.membership.roster import State
from afserve.control.requests import Requests
from afserve.control.wire.request_values import gateway_of
from afserve.control.wire.values import (
    PROTOCOL,
    Endpoint,
    ExpertPeer,
    Register,
)
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent
from afserve.errors import PeerLost, RendezvousError
from afserve.member import MODEL_ROLES, NodeId, attention_life, expert_life, expert_node

NODES = tuple(NodeId(role, index) for role in MODEL_ROLES for index in range(2))


def members(nodes=NODES, *, colocated=False):
    return Members(nodes, "1.0", colocated)


def admit(table, request):
    return table.admit_member(table.check_register(request), request, 0.0)


def register(role="attention", index=None, version="1.0", protocol=PROTOCOL):
    return Register(role, index, 1, "host", version, protocol)


def test_places_are_given_in_order_and_once():
    table = members()
    assert [str(admit(table, register()).node) for _ in range(2)] == ["attention-0", "attention-1"]
    assert admit(table, register("expert", 1)).node == expert_node(1)
    assert table.vacancies() == [expert_node(0)]
    with pytest.raises(RendezvousError, match="all 2 places for attention nodes are taken"):
        table.check_register(register())
    with pytest.raises(RendezvousError, match="expert-1 is registered already"):
        table.check_register(register("expert", 1))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (register(version="0.9"), "version: the node has 0.9, the controller 1.0"),
        (register(protocol=99), f"protocol: the node has 99, the controller {PROTOCOL}"),
        (register("driver"), "role: 'driver' is not one of attention, expert"),
        (register("expert", 5), "index: 5 is none of the places for expert nodes, which are 0, 1"),
    ],
)
def test_a_stranger_is_refused_by_field(request_, field):
    with pytest.raises(RendezvousError, match=field):
        members().check_register(request_)


def test_colocated_runs_have_no_expert_nodes():
    with pytest.raises(RendezvousError, match="colocated"):
        members(NODES[:2], colocated=True).check_register(register("expert"))


def test_a_disagreement_names_both_nodes_and_the_field():
    table = members()
    first, second = (admit(table, register("expert")) for _ in range(2))
    table.agree(first, Endpoint("shm:0", {"hidden": "64", "top_k": "2"}))
    assert table.peers(settled=False) is None
    with pytest.raises(RendezvousError, match="expert-1 disagrees with expert-0 on hidden: 32 against 64"):
        table.agree(second, Endpoint("shm:1", {"hidden": "32", "top_k": "2"}))
    assert table.peers(settled=False).experts == (
        ExpertPeer(expert_life(0, 0), "shm:0"),
        ExpertPeer(expert_life(1, 0), "shm:1"),
    )
    assert table.peers(settled=True).experts == ()  # nobody serves yet


def test_copies_are_compared_thing_by_thing():
    """Roles read different tensors: attention nodes with attention nodes, expert nodes with expert nodes."""
    table = members()
    attention, other = (admit(table, register()) for _ in range(2))
    expert = admit(table, register("expert"))
    table.identify(attention, {"attention weights": "aa (9 tensors of BF16)", "tokenizer.json": "cc"})
    table.identify(expert, {"expert weights": "bb"})
    with pytest.raises(RendezvousError) as caught:
        table.identify(other, {"attention weights": "dd (9 tensors of F32)", "tokenizer.json": "cc"})
    assert caught.value.message.startswith(
        "attention-1 disagrees with attention-0 on attention weights: dd (9 tensors of F32) against aa (9 tensors of "
    )


@pytest.mark.parametrize("first", ["the controller", "the node"])
def test_the_controllers_copy_is_the_one_to_have(first):
    table = members()
    expert = admit(table, register("expert"))
    steps = [
        lambda: table.expect_copy({"expert weights": "aa", "attention weights": "bb"}),
        lambda: table.identify(expert, {"expert weights": "cc"}),
    ]
    for number, step in enumerate(steps if first == "the controller" else reversed(steps)):
        if number == 0:
            step()
            continue
        with pytest.raises(
            RendezvousError, match="expert-0 disagrees with the controller on expert weights: cc against aa"
        ):
            step()


def test_a_node_that_says_nothing_of_its_copy_is_refused():
    table = members()
    one, other = (admit(table, register()) for _ in range(2))
    table.check_identified(one)  # nobody has said anything
    table.identify(one, {"attention weights": "aa"})
    table.check_identified(one)
    with pytest.raises(
        RendezvousError, match="attention-1 is ready, but has not said what it has of the checkpoint"
    ):
        table.check_identified(other)


def test_a_place_is_taken_again_by_its_next_generation():
    table = members()
    first = admit(table, register("expert", 0))
    table.set_state(first, State.GONE)
    assert table.find_life(first.id) is None and expert_node(0) in table.vacancies()
    second = admit(table, register("expert"))
    assert (second.node, second.id.generation) == (expert_node(0), 1)
    assert table.find_life(second.id) is second and table.find_life(first.id) is None


def test_says_who_is_missing_and_who_is_slow():
    table = members()
    for role in ("attention", "attention", "expert"):
        table.set_state(admit(table, register(role)), State.READY)
    assert table.unready() == ["expert-1 never registered"] and not table.all_ready()
    admit(table, register("expert"))
    assert table.unready() == ["expert-1 is at 0% (starting)"]


ASKED = GenerationRequest(0, (1, 2))
HERE, THERE = attention_life(0, 0), attention_life(1, 3)


def test_a_request_gives_its_own_events_and_keeps_what_it_got():
    async def scenario():
        requests = Requests()
        first, second = requests.open(ASKED, 0.0), requests.open(ASKED, 0.0)
        assert requests.waiting == [first, second] and len(requests) == 2
        for request, home in ((first, HERE), (second, THERE)):
            assert requests.place(request, home, 0.0).request.handle == request.number
        ended = requests.deliver(
            [TokenEvent(2, (5,)), TokenEvent(1, (6, 7), "stop"), TokenEvent(77, (1,), "stop")]
        )
        assert ended == (1, 77), "also an end that nobody waits for is acknowledged"
        event = await first.get()
        assert (event.token_ids, first.finished) == ((6, 7), True)
        assert (await second.get()).token_ids == (5,)
        assert (first.generated, second.generated) == ([6, 7], [5])
        assert (requests.load(HERE), requests.load(THERE)) == (1, 1)
        requests.fail(PeerLost("expert-0", "gone"))
        with pytest.raises(PeerLost, match="expert-0: gone"):
            await second.get()
        for request in (first, second, second):
            requests.close(request)
        assert len(requests) == 0 and requests.homes() == []

    asyncio.run(scenario())


def test_a_request_that_moves_has_another_number_and_what_it_got_so_far():
    async def scenario():
        requests = Requests()
        request = requests.open(ASKED, 0.0)
        first = requests.place(request, HERE, 0.0).request
        requests.deliver([TokenEvent(first.handle, (5, 6))])
        requests.unplace(request, 3.0)
        assert (request.home, request.last, request.since, requests.waiting) == (None, HERE, 3.0, [request])
        second = requests.place(request, THERE, 0.0).request
        assert second.handle != first.handle and second.generated == (5, 6)
        requests.deliver([TokenEvent(first.handle, (9,)), TokenEvent(second.handle, (7,), "stop")])
        assert request.generated == [5, 6, 7] and request.finished

    asyncio.run(scenario())


def test_no_two_gateways_and_no_two_lives_give_out_the_same_number():
    def number(index, life):
        requests = Requests(index, life)
        return requests.place(requests.open(ASKED, 0.0), HERE, 0.0).request.handle

    opened = [number(index, life) for index in range(4) for life in range(3)]
    assert len(set(opened)) == 12 and [gateway_of(one) for one in opened] == [i // 3 for i in range(12)]
