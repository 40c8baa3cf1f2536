"""Where memory lies, as the kernel says: of a bound thread, and of mailboxes, whose reader decides."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from afserve.comm.binding import Binding, bind, own_memory, refusal
from afserve.comm.transport import Box, Kind
from afserve.comm.transports import connect
from tests.comm.conformance import LAYOUT, answer, arrive, content, send

pytestmark = pytest.mark.skipif(
    bool(refusal(0)), reason="this kernel or container lets nobody choose a node's memory"
)
ABSENT = 1023  # the last one that a kernel can have
BOX, BOTH = Box(1, 0, 1), (Kind.DISPATCH, Kind.COMBINE)


@pytest.fixture
def bound():
    """Runs something in a thread that is bound to memory of node 0; this one is not."""
    with ThreadPoolExecutor(1) as thread:
        cores = tuple(os.sched_getaffinity(0))
        assert thread.submit(bind, Binding(cores, 0)).result() == ""
        yield lambda call, *args, **named: thread.submit(call, *args, **named).result()


def test_a_thread_has_what_it_was_bound_to_and_others_have_not(bound):
    assert (bound(own_memory), own_memory()) == (0, None)


def test_what_the_kernel_refuses_is_returned_and_cores_are_bound_all_the_same():
    core = min(os.sched_getaffinity(0))
    with ThreadPoolExecutor(1) as thread:
        where = Binding((core,), ABSENT)
        assert thread.submit(bind, where).result() == f"memory of NUMA node {ABSENT}: Invalid argument"
        assert thread.submit(os.sched_getaffinity, 0).result() == {core}
        assert thread.submit(bind, Binding((core,), ABSENT, "no")).result() == "", "it was said already"
        assert thread.submit(bind, Binding((1 << 12,), 0)).result().startswith("cores 4096: ")
    assert refusal(ABSENT)


@pytest.mark.parametrize("reader", BOTH)
def test_mailboxes_lie_at_their_reader(bound, reader):
    def listen():
        return connect.listen("shm", expert=0, attention_nodes=2, layout=LAYOUT)

    def dial(address):
        return connect.connect([address], attention=1, layout=LAYOUT, timeout=10.0)

    end, address = bound(listen) if reader is Kind.DISPATCH else listen()
    front = bound(dial, address) if reader is Kind.COMBINE else dial(address)
    for side in (end, front):  # each has a map of its own: who writes asks the same memory
        (segment,) = side._segments.values()
        found = {kind: own_memory(segment._address(BOX, kind)) for kind in BOTH}
        assert found == {kind: 0 if kind is reader else None for kind in BOTH}
    sent = send(front, BOX, 1, 3)
    assert (arrive(end, BOX).x_RH == sent.x_RH).all()
    answer(end, BOX, sent.header, 2)
    assert (arrive(front, BOX).x_RH == content(2, 3, LAYOUT.hidden)).all()
    front.close()
    end.close()
