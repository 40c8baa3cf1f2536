"""Parts of others' prompts at a node that helps."""

from afserve.clock import FakeClock
from afserve.comm.kv import wires
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.messages import Prefill
from afserve.comm.kv.split import Split, SplitMember
from afserve.comm.kv.split_messages import Go, Leave, Propose, wrap
from afserve.comm.kv.wires import Event, PeerMessage
from afserve.engine.kv.moving.prefilling import Prefilling
from afserve.engine.kv.moving.restoring import Restores
from tests.comm.kv_world import Store
from tests.engine.scripted_kv import ScriptedEngine, unscripted

SPLIT, MEMBERS = Split(32, 0, 8, 2, 1), (SplitMember(9, "lead"), SplitMember(1, "me"))


class Wires(wires.Wires):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def dial(self, address):
        return 1

    def send(self, peer, message):
        assert message

    def has_room(self, peer):
        return True

    def takes_large(self, peer):
        return False

    def room(self, peer, size):
        unscripted(peer, size)

    def close(self):
        pass

    def used(self, said):
        assert said

    kept = moving = False

    def leave(self):
        pass

    def give_way(self):
        pass

    def apart(self, peer):
        pass

    def receive(self, keep=False):
        found, self.events = self.events, []
        return found


class Node(ScriptedEngine):
    chunk_tokens = 8

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.cancelled: list[int] = []

    def usable_names(self, request):
        return []

    def submit(self, request, shared=None):
        self.submitted.append(request.handle)

    def cancel(self, handle):
        self.cancelled.append(handle)


def told(*messages):
    """What the node did, when it was told all of these between two steps; its exchange."""
    mine, node = Wires(), Node()
    exchange = Exchange(Store(64), mine, FakeClock(), 1)
    restores = Restores(None, node, FakeClock(), 2, 64, print, 1)
    prefilling = Prefilling(node, exchange, FakeClock(), 2, lambda blocks: 0.0, restores)
    asked = Prefill(3, 1, 1, tuple(range(SPLIT.end)))
    for turn in ([Propose(77, SPLIT, MEMBERS, asked)], messages, []):
        mine.events = [PeerMessage(5, wrap(message)) for message in turn]
        exchange.turn(1.0)
        prefilling.take()
    return node, exchange


def test_a_part_begins_when_all_have_joined():
    node, exchange = told(Go(77))
    assert len(node.submitted) == 1 and exchange.sharing.busy


def test_a_part_that_is_over_before_it_has_begun_is_not_computed():
    node, exchange = told(Go(77), Leave(77, "the decode node has cancelled"))
    assert not node.submitted and not exchange.sharing.busy
