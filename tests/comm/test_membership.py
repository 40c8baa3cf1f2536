"""Expert nodes that join, leave and are replaced under a running attention node, over every transport."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from afserve.comm.m2n.link import ExpertLink
from afserve.comm.transport import Box
from afserve.comm.transports import connect
from afserve.errors import PeerLost, RendezvousError
from afserve.placement.placement import Placement
from tests.comm.conformance import LAYOUT, PATIENCE, answer, arrive, content, send

KINDS = [kind for kind in connect.kinds() if kind != "symm"]  # which is between processes only


def listen(kind, expert):
    return connect.listen(kind, expert=expert, attention_nodes=2, layout=LAYOUT)


def trip(front, end, box, seed=3):
    sent = send(front, box, seed, 2)
    got = arrive(end, box)
    assert got.header == sent.header
    answer(end, box, got.header, seed + 1)
    assert (arrive(front, box).x_RH == content(seed + 1, 2, LAYOUT.hidden)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_node_joins_while_another_one_works(kind):
    first, address = listen(kind, 0)
    front = connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    trip(front, first, Box(0, 0, 0))
    under_way = send(front, Box(0, 0, 1), 8, 3)
    second, address = listen(kind, 1)
    front.attach(front.dial(1, address, 10.0))
    assert front.boxes() == [Box(0, f, m) for f in range(2) for m in range(2)]
    trip(front, second, Box(0, 1, 0))
    got = arrive(first, Box(0, 0, 1))
    assert got.header == under_way.header
    answer(first, Box(0, 0, 1), got.header, 9)
    assert (arrive(front, Box(0, 0, 1)).x_RH == content(9, 3, LAYOUT.hidden)).all()
    front.detach(0)
    assert front.boxes() == [Box(0, 1, m) for m in range(2)]
    trip(front, second, Box(0, 1, 1))
    with pytest.raises(PeerLost, match="attention-0"):
        for _ in range(3):
            first.wait(first.boxes(), 10.0)
    for end in (front, first, second):
        end.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_expert_nodes_place_is_taken(kind):
    ends = [listen(kind, f) for f in range(2)]
    front = connect.connect([address for _, address in ends], attention=1, layout=LAYOUT, timeout=PATIENCE)
    for turn in range(3):
        trip(front, ends[0][0], Box(1, 0, 0), turn)
    ends[0][0].close()
    with pytest.raises(PeerLost, match="expert-0"):
        for _ in range(3):
            front.wait([Box(1, 0, 0)], 10.0)
    fresh, address = listen(kind, 0)
    front.attach(front.dial(0, address, 10.0))
    for turn in range(3):
        trip(front, fresh, Box(1, 0, 0), turn)
        trip(front, ends[1][0], Box(1, 1, 1), turn)
    for end in (front, fresh, ends[1][0]):
        end.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_join_changes_nothing(kind):
    first, address = listen(kind, 0)
    front = connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    other, wrong = listen(kind, 5)
    with pytest.raises(RendezvousError, match="expert is 5 there and 1 here"):
        front.dial(1, wrong, 5.0)
    trip(front, first, Box(0, 0, 0))
    assert front.boxes() == [Box(0, 0, m) for m in range(2)]
    for end in (front, first, other):
        end.close()


def test_a_link_uses_a_node_that_joined(build_cluster):
    """Placement over one node, then over two: the second is attached in between."""
    from afserve.comm.m2n.port import ExpertPort
    from afserve.engine.expert_node import ExpertNode

    narrow = Placement.contiguous(layers=1, experts=4, nodes=1)
    wide = Placement.contiguous(layers=1, experts=4, nodes=2, slots_per_node=4, epoch=1)
    cluster = build_cluster("shm", 1, narrow, top_k=2)
    link, bank = cluster.links[0], type(cluster.banks[0])
    end, address = connect.listen("shm", expert=1, attention_nodes=1, layout=cluster.layout)
    held = [{(n, s): e for n, s, e in wide.held(f)} for f in range(2)]
    cluster.nodes.append(ExpertNode(ExpertPort(end), bank(held[1]), epoch=1, clock=cluster.clock))
    cluster.nodes[0].accept(1)
    cluster.banks[0].held.update(held[0])
    assert isinstance(link, ExpertLink)
    link.attach(link.dial(1, address, 5.0))
    link.adopt(wide)
    batch = cluster.rows(6, 3)
    ticket = link.dispatch(*batch, layer=0, micro_batch=0)
    assert {part.box.expert for part in ticket.parts} == {0, 1}
    assert torch.equal(cluster.finish(link, ticket), cluster.expected(0, *batch))


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_is_dialled_in_another_thread_while_others_work(kind):
    first, address = listen(kind, 0)
    front = connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    second, address = listen(kind, 1)
    with ThreadPoolExecutor(1) as threads:
        dialling = threads.submit(front.dial, 1, address, 10.0)
        for turn in range(20):
            trip(front, first, Box(0, 0, turn % 2), turn)
        dialled = dialling.result()
    assert dialled.expert == 1 and front.boxes() == [Box(0, 0, m) for m in range(2)]
    under_way = send(front, Box(0, 0, 1), 8, 3)
    front.attach(dialled)
    trip(front, second, Box(0, 1, 0))
    assert arrive(first, Box(0, 0, 1)).header == under_way.header
    for end in (front, first, second):
        end.close()


@pytest.mark.parametrize("kind", KINDS)
def test_who_was_dialled_and_is_not_needed_is_left(kind):
    """The place is free again, so the next one to dial it gets it."""
    first, address = listen(kind, 0)
    front = connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    second, address = listen(kind, 1)
    front.dial(1, address, 10.0).close()
    for _ in range(1000):
        try:
            second.wait(second.boxes(), 0.01)
            front.attach(front.dial(1, address, 10.0))
            break
        except (RendezvousError, PeerLost):
            continue  # it has not yet seen that the first connection has ended
    trip(front, second, Box(0, 1, 0))
    for end in (front, first, second):
        end.close()


@pytest.mark.parametrize("kind", [kind for kind in connect.kinds() if kind not in ("symm", "dist")])
def test_an_attention_node_may_begin_with_expert_nodes_whose_numbers_have_gaps(kind):
    ends = {e: connect.listen(kind, expert=e, attention_nodes=1, layout=LAYOUT) for e in (1, 3)}
    addresses = {e: address for e, (_, address) in ends.items()}
    front = connect.connect(addresses, attention=0, layout=LAYOUT, timeout=PATIENCE)
    assert {box.expert for box in front.boxes()} == {1, 3}
    for end in (front, *(end for end, _ in ends.values())):
        end.close()
