"""Parts of others' prompts at a node that helps."""

from afserve.clock import FakeClock
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.messages import Prefill
from afserve.comm.kv.split import Split, SplitMember
from afserve.comm.kv.split_messages import Go, Leave, Propose, wrap
from afserve.comm.kv.wires import Said
from afserve.engine.kv.moving.prefilling import Prefilling
from tests.comm.kv_world import Store

SPLIT, MEMBERS = Split(32, 0, 8, 2, 1), (SplitMember(9, "lead"), SplitMember(1, "me"))


class Wires:
    def __init__(self) -> None:
        self.events = []

    def dial(self, address):
        return 1

    def send(self, peer, message):
        assert message

    def has_room(self, peer):
        return True

    def used(self, said):
        assert said

    kept = moving = False

    def leave(self):
        pass

    give_way = leave

    def apart(self, peer):
        pass

    def receive(self, keep=False):
        found, self.events = self.events, []
        return found


class Node:
    queued_tokens, prompt_rate, chunk_tokens = 0, 0.0, 8

    def __init__(self) -> None:
        self.submitted, self.cancelled = [], []

    def usable_names(self, request):
        return []

    def known(self, names):
        return 0

    def submit(self, request, shared=None):
        self.submitted.append(request.handle)

    def cancel(self, handle):
        self.cancelled.append(handle)

    def draw(self, *what):
        assert what

    draw_arrow = draw


def told(*messages):
    """What the node did, when it was told all of these between two steps; its exchange."""
    wires, node = Wires(), Node()
    exchange = Exchange(Store(64), wires, FakeClock(), 1)
    prefilling = Prefilling(node, exchange, FakeClock(), 2, lambda blocks: 0.0, None)
    asked = Prefill(3, 1, 1, tuple(range(SPLIT.end)))
    for turn in ([Propose(77, SPLIT, MEMBERS, asked)], messages, []):
        wires.events = [Said(5, wrap(message)) for message in turn]
        exchange.turn(1.0)
        prefilling.take()
    return node, exchange


def test_a_part_begins_when_all_have_joined():
    node, exchange = told(Go(77))
    assert len(node.submitted) == 1 and exchange.sharing.busy


def test_a_part_that_is_over_before_it_has_begun_is_not_computed():
    node, exchange = told(Go(77), Leave(77, "the decode node has cancelled"))
    assert not node.submitted and not exchange.sharing.busy
