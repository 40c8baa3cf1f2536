"""Pairs over nccl, by a stand-in that blocks as nccl does: in the first send between two GPUs until the other end has
entered its receive. No payload may depend on a header that comes after it, and who does not come is named in time."""

import logging
import threading
import time
from dataclasses import replace

import pytest
import torch

from afserve.comm.transport import Box, Connecting, ListenSpec
from afserve.comm.transports import connect
from afserve.errors import RendezvousError
from tests.comm.conformance import BATTERY, LAYOUT, PATIENCE, Ends, answer, arrive, content, send

if "dist" in connect.kinds():
    from afserve.comm.transports import dist
    from afserve.comm.transports.group_pair import NcclPair
    from afserve.comm.transports.pair_stream import Carriage

pytestmark = pytest.mark.skipif("dist" not in connect.kinds(), reason="this PyTorch has no gloo")
BOX, CPU = Box(0, 0, 0), torch.device("cpu")


class Work:
    def is_completed(self):
        return True

    def wait(self):
        return True


class Communicator:
    """One direction is connected by the first send and receive in it."""

    def __init__(self, store, rank, timeout, device):
        self._store, self._rank = store, rank
        self._said, self._heard = 0, 0
        self.aborted = threading.Event()
        store.set(f"here-{rank}", "")
        self._wait(f"here-{1 - rank}")

    def send(self, tensors, other, tag):
        self._store.set(f"sends-{self._rank}", "")
        self._wait(f"receives-{other}")
        self._store.set(f"{self._rank}-{self._said}", tensors[0].numpy().tobytes())
        self._said += 1
        return Work()

    def recv(self, tensors, other, tag):
        self._store.set(f"receives-{self._rank}", "")
        self._wait(f"sends-{other}")
        self._wait(f"{other}-{self._heard}")
        raw = bytearray(self._store.get(f"{other}-{self._heard}"))
        self._heard += 1
        tensors[0][: len(raw)] = torch.frombuffer(raw, dtype=torch.uint8)
        return Work()

    def abort(self):
        self.aborted.set()

    def _wait(self, key):
        while not self._store.check([key]):
            if self.aborted.wait(0.001):
                raise RuntimeError("the communicator was aborted")


class Deaf(Communicator):
    """Of a node that is stopped once its communicators are there."""

    def recv(self, tensors, other, tag):
        self._wait("never")


class Dying(Communicator):
    """Of a node that dies while the other end sends it its first message."""

    def recv(self, tensors, other, tag):
        self._wait(f"sends-{other}")
        raise RuntimeError("it dies")


def way(communicator=Communicator, seconds=()):
    """`seconds` are taken from by the first pairs: what they have to meet in, once they have greeted each other."""

    def open(known):
        return NcclPair(replace(known, timeout=seconds.pop() if seconds else known.timeout), communicator)

    return Carriage(CPU, inline_most=0, open=open)


def over_nccl(attention, experts, layout):
    pairs = [dist.listen(ListenSpec(f, attention, layout), way()) for f in range(experts)]
    addresses = {f: address for f, (_, address) in enumerate(pairs)}
    fronts = [dist.connect(Connecting(addresses, a, layout, PATIENCE), way()) for a in range(attention)]
    return Ends(fronts, [end for end, _ in pairs])


@pytest.mark.slow
@pytest.mark.parametrize("check", BATTERY, ids=lambda check: check.__name__)
def test_battery(check):
    check(over_nccl)


@pytest.mark.slow
def test_without_a_first_message_both_ways_a_node_blocks_in_its_first_payload(monkeypatch):
    """What warming up is for: the sender is in nccl, its header not sent, and the other end asks for nothing."""
    monkeypatch.setattr(NcclPair, "_first", lambda *_: None)
    ends = over_nccl(1, 1, LAYOUT)
    front, back = ends.attention[0], ends.experts[0]
    front.ready([])
    sending = threading.Thread(target=lambda: send(front, BOX, 1, 3), daemon=True)
    sending.start()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert back.wait([BOX], 0.05) == []
    assert sending.is_alive()
    front._streams[0]._pair.close()
    sending.join(PATIENCE)
    assert not sending.is_alive()
    ends.close()


def test_payloads_go_both_ways_at_once_after_the_first_messages():
    """Each end sends before it looks for anything."""
    ends = over_nccl(1, 1, LAYOUT)
    front, back = ends.attention[0], ends.experts[0]
    other = Box(0, 0, 1)
    send(front, other, 5, 2)
    got = arrive(back, other)
    send(front, BOX, 1, 3)
    answer(back, other, got.header, 9)
    assert (arrive(front, other).x_RH == content(9, 2, LAYOUT.hidden)).all()
    assert arrive(back, BOX).header.rows == 3
    ends.close()


@pytest.mark.slow
def test_an_expert_node_that_takes_no_first_message_is_named_in_time():
    end, address = dist.listen(ListenSpec(0, 1, LAYOUT), way(Deaf))
    with pytest.raises(
        RendezvousError, match=rf"expert-0 did not meet attention-0 within {PATIENCE:g} s \(no answer within"
    ):
        dist.connect(Connecting({0: address}, 0, LAYOUT, PATIENCE), way(seconds=[0.5]))
    end.close()


@pytest.mark.slow
def test_an_attention_node_that_does_not_come_is_named_and_holds_up_nobody_else(caplog):
    seconds = [1.0]
    end, address = dist.listen(ListenSpec(0, 2, LAYOUT), way(seconds=seconds))
    caplog.set_level(logging.WARNING, "afserve.comm")
    stopped = threading.Thread(target=lambda: connect_in_vain(address), daemon=True)
    stopped.start()
    until = time.monotonic() + PATIENCE
    while seconds and time.monotonic() < until:
        time.sleep(0.001)
    front = dist.connect(Connecting({0: address}, 1, LAYOUT, PATIENCE), way())
    send(front, Box(1, 0, 0), 1, 2)
    assert arrive(end, Box(1, 0, 0)).header.rows == 2
    while "attention-0 did not come to meet this node (no answer within" not in caplog.text:
        assert time.monotonic() < until, caplog.text
        time.sleep(0.01)
    stopped.join(PATIENCE)
    front.close()
    end.close()


def connect_in_vain(address):
    with pytest.raises(RendezvousError):
        dist.connect(Connecting({0: address}, 0, LAYOUT, PATIENCE), way(Deaf))


def test_an_attention_node_that_dies_while_it_is_met_is_named_at_once(caplog):
    end, address = dist.listen(ListenSpec(0, 1, LAYOUT), way())
    caplog.set_level(logging.WARNING, "afserve.comm")
    with pytest.raises(RendezvousError, match="it dies"):
        dist.connect(Connecting({0: address}, 0, LAYOUT, PATIENCE), way(Dying))
    until = time.monotonic() + PATIENCE / 2  # of the minute that it had
    while "attention-0 did not come to meet this node (it hung up)" not in caplog.text:
        assert time.monotonic() < until, caplog.text
        time.sleep(0.01)
    front = dist.connect(Connecting({0: address}, 0, LAYOUT, PATIENCE), way())
    front.close()
    end.close()
