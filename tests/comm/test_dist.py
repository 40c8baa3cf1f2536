"""Gloo between processes and between hosts: who is gone or disagrees is named, and only one address listens."""

import os
import re
import signal
import socket
import struct
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.comm.mailbox.record import record_segment
from afserve.comm.mailbox.segment import SegmentMap
from afserve.comm.mailbox.wire import HEADER_BYTES, LONGEST_REASON
from afserve.comm.transport import Box, Connecting, Header, Kind, ListenSpec
from afserve.comm.transports import connect
from afserve.errors import ConfigError, PeerLost, ProtocolError, RendezvousError
from tests.comm.begun import FORKED
from tests.comm.conformance import BATTERY, LAYOUT, PATIENCE, Ends, answer, arrive, content, send

if "dist" in connect.kinds():
    from afserve.comm.transports import dist, group_pair, groups, venue
    from afserve.comm.transports.pair_stream import Carriage

pytestmark = pytest.mark.skipif("dist" not in connect.kinds(), reason="this PyTorch has no gloo")
BOX = Box(0, 0, 0)


def echo(pipe, host="127.0.0.1"):
    """An expert node that answers until it is killed, or left by everybody."""
    end, address = connect.listen("dist", expert=0, attention_nodes=2, layout=LAYOUT, host=host)
    pipe.send(address)
    while True:
        try:
            for box in end.wait(end.boxes(), 1.0):
                answer(end, box, end.take(box).header, 9)
        except PeerLost:
            continue


def front(address, pipe):
    """An attention node that dies in the middle of a round trip."""
    end = connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    send(end, BOX, 1, 3)
    arrive(end, BOX)
    send(end, BOX, 40, 3)
    pipe.send("sent")
    signal.pause()


@pytest.fixture
def start():
    started = []

    def run(target, *args):
        mine, theirs = FORKED.Pipe()
        process = FORKED.Process(target=target, args=(*args, theirs), daemon=True)
        process.start()
        started.append(process)
        return process, mine

    yield run
    for process in started:
        process.kill()
        process.join()


@pytest.mark.process
def test_a_killed_expert_node_is_named(start):
    process, pipe = start(echo)
    assert pipe.poll(60)
    end = connect.connect([pipe.recv()], attention=0, layout=LAYOUT, timeout=PATIENCE)
    for turn in range(20):
        send(end, BOX, turn, 4)
        assert (arrive(end, BOX).x_RH == content(9, 4, LAYOUT.hidden)).all()
    process.kill()
    with pytest.raises(PeerLost, match="expert-0: its connection has ended"):
        end.wait([BOX], 60.0)
    with pytest.raises(PeerLost):
        send(end, BOX, 1, 1)
    end.close()


def dial_stopped(pipe):
    """An attention node that dials nodes which are stopped, and ends."""
    while address := pipe.recv():
        try:
            connect.connect([address], attention=0, layout=LAYOUT, timeout=1.0)
        except RendezvousError as error:
            pipe.send(str(error))


def stop(pid):
    """All of its threads: each of them takes the signal when its turn comes."""
    os.kill(pid, signal.SIGSTOP)
    threads = [Path(f"/proc/{pid}/task/{one.id}/stat") for one in psutil.Process(pid).threads()]
    until = time.monotonic() + 30
    while any(path.read_text().rsplit(")", 1)[1].split()[0] != "T" for path in threads):
        assert time.monotonic() < until, "it goes on"
        time.sleep(0.001)


@pytest.mark.process
def test_a_stopped_expert_node_is_named_in_time_and_holds_no_process(start):
    """Its kernel takes connections, and then nobody says anything."""
    expert, theirs = start(echo)
    assert theirs.poll(60)
    address = theirs.recv()
    dialler, mine = start(dial_stopped)
    stop(expert.pid)
    for _ in range(2):
        mine.send(address)
        assert mine.poll(60), "it waits for ever"
        assert re.match("expert-0: nobody answers at .* within 1 s; is it running", mine.recv())
    mine.send("")
    dialler.join(20)
    assert dialler.exitcode == 0


@pytest.mark.process
@pytest.mark.parametrize("call", ["door", "pair"])
def test_a_node_that_stops_while_it_is_joined_is_named_in_time(start, call):
    expert, theirs = start(echo)
    assert theirs.poll(60)
    host, port = theirs.recv().split(":")[1:]
    meeting = groups.join_store(host, int(port), "expert-0", 10.0)
    stop(expert.pid)
    if call == "door":
        with pytest.raises(RendezvousError, match="expert-0 said nothing for 1 s"):
            venue.dial_by_store(meeting, "expert-0", 1.0)
    else:
        here, there = socket.socketpair()
        known = venue.Introduction(here, meeting, "pair", 1, 1.0, torch.device("cpu"), LAYOUT)
        with here, there, pytest.raises(RuntimeError, match="no answer within 1 s"):
            group_pair.open_pair(known)


@pytest.mark.process
def test_a_killed_attention_nodes_place_can_be_taken(start):
    end, address = connect.listen("dist", expert=0, attention_nodes=2, layout=LAYOUT)
    process, pipe = start(front, address)
    answer(end, BOX, arrive(end, BOX).header, 1)
    assert pipe.poll(60)
    unanswered = arrive(end, BOX)
    process.kill()
    with pytest.raises(PeerLost, match="attention-0: its connection has ended"):
        end.wait([BOX], 60.0)
    successor = connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    sent = send(successor, BOX, 5, 2)
    answer(end, BOX, unanswered.header, 2)
    assert successor.wait([BOX], 0.05) == []
    got = arrive(end, BOX)
    assert got.header == sent.header
    answer(end, BOX, got.header, 3)
    assert (arrive(successor, BOX).x_RH == content(3, 2, LAYOUT.hidden)).all()
    successor.close()
    end.close()


def test_only_the_given_address_listens():
    before = {c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
    end, address = connect.listen("dist", expert=0, attention_nodes=1, layout=LAYOUT, host="127.0.0.2")
    assert address.startswith("dist:127.0.0.2:")
    other = connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    send(other, BOX, 1, 2)
    arrive(end, BOX)
    mine = {
        c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN
    } - before
    assert mine and all(found.ip.startswith("127.0.0.") for found in mine)
    other.close()
    end.close()


def test_a_mismatch_a_missing_node_and_a_wrong_address_are_named():
    theirs = replace(LAYOUT, hidden=25)
    end, address = connect.listen("dist", expert=0, attention_nodes=1, layout=theirs)
    with pytest.raises(
        RendezvousError, match="expert-0 and attention-0 do not agree: hidden is 25 there and 24 here"
    ):
        connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    end.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(RendezvousError, match=f"expert-0: nobody answers at 127.0.0.1:{port} within 2 s"):
        connect.connect([f"dist:127.0.0.1:{port}"], attention=0, layout=LAYOUT, timeout=2.0)
    assert time.monotonic() - began < 60
    with pytest.raises(RendezvousError, match="not an address of the form dist:HOST:PORT"):
        connect.connect(["dist:nowhere"], attention=0, layout=LAYOUT, timeout=2.0)
    with pytest.raises(RendezvousError, match=r"cannot listen on 203\.0\.113\.7"):
        connect.listen("dist", expert=0, attention_nodes=1, layout=LAYOUT, host="203.0.113.7")


def test_a_second_node_of_the_same_index_is_refused():
    end, address = connect.listen("dist", expert=0, attention_nodes=1, layout=LAYOUT)
    first = connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    with pytest.raises(RendezvousError, match="expert-0 did not take attention-0 in: another node"):
        connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    send(first, BOX, 1, 2)
    answer(end, BOX, arrive(end, BOX).header, 3)
    arrive(first, BOX)
    first.close()
    end.close()


def through_the_group(attention, experts, layout):
    """Ends whose payloads all go through gloo, as large ones do."""
    way = Carriage(torch.device("cpu"), inline_most=0)
    pairs = [dist.listen(ListenSpec(f, attention, layout), way) for f in range(experts)]
    addresses = [address for _, address in pairs]
    return Ends(
        [
            dist.connect(Connecting(dict(enumerate(addresses)), a, layout, 10.0), way)
            for a in range(attention)
        ],
        [end for end, _ in pairs],
    )


@pytest.mark.slow
@pytest.mark.parametrize("check", BATTERY, ids=lambda check: check.__name__)
def test_battery_with_every_payload_through_the_group(check):
    check(through_the_group)


def test_a_payload_that_is_announced_and_does_not_come_is_a_lost_peer(monkeypatch):
    monkeypatch.setattr("afserve.comm.transports.pair_stream._REST_SECONDS", 0.2)
    ends = through_the_group(1, 1, LAYOUT)
    monkeypatch.setattr("afserve.comm.transports.group_pair.GlooPair.send", lambda *_: None)
    send(ends.attention[0], BOX, 1, 3)
    with pytest.raises(PeerLost, match="attention-0: its connection has ended"):
        for _ in range(1000):
            ends.experts[0].wait([BOX], 0.05)
    ends.close()


def test_a_late_payload_is_not_taken_for_the_next_one():
    """Two dispatches under way in one box, as after one that was given up: both come in, the last one counts."""
    ends = through_the_group(1, 1, LAYOUT)
    send(ends.attention[0], BOX, 1, 6)
    sent = send(ends.attention[0], BOX, 2, 4)
    for _ in range(1000):
        if ends.experts[0].ready([BOX]) and ends.experts[0].take(BOX).header == sent.header:
            break
        ends.experts[0].wait([BOX], 0.01)
    else:
        raise AssertionError("the second dispatch did not arrive")
    answer(ends.experts[0], BOX, sent.header, 9)
    assert (arrive(ends.attention[0], BOX).x_RH == content(9, 4, LAYOUT.hidden)).all()
    ends.close()


@pytest.mark.slow
@given(
    kind=st.integers(0, 255),
    micro_batch=st.sampled_from([0, 1, 2, 0xFFFF]),
    payload=st.sampled_from([0, 1, 7, 64, 100, 511, 513, 1 << 12, 1 << 20, 1 << 40, (1 << 64) - 1]),
    inline=st.integers(0, 2),
    after=st.binary(max_size=80),
)
@settings(max_examples=25, deadline=None)
def test_any_record_from_a_member(kind, micro_batch, payload, inline, after):
    """It is refused or its sender is dropped; what the other member sends is not touched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("afserve.comm.transports.pair_stream._REST_SECONDS", 0.05)
        way = Carriage(torch.device("cpu"), inline_most=0)
        end, address = dist.listen(ListenSpec(0, 2, LAYOUT), way)
        bad, good = (dist.connect(Connecting({0: address}, a, LAYOUT, PATIENCE), way) for a in range(2))
        header = struct.Struct("<IHBBIIIHHHHIQ").pack(
            0x41465356, 1, kind, 1, 0, 1, 0, 0, 0, micro_batch, 0, 2, payload
        )
        record = header.ljust(48, b"\0") + bytes([inline]) + bytes(HEADER_BYTES - 49)
        sent = send(good, Box(1, 0, 1), 3, 4)
        bad._streams[0]._connection.sendall(record + after)
        for _ in range(20):
            try:
                found = end.wait([BOX], 0.01)
                if found:
                    end.take(BOX)
            except (PeerLost, ProtocolError):
                break
        got = arrive(end, Box(1, 0, 1))
        assert got.header == sent.header and torch.equal(got.x_RH, sent.x_RH)
        for one in (bad, good, end):
            one.close()


def test_payloads_on_a_gpu_need_a_pytorch_with_nccl():
    if torch.distributed.is_nccl_available():
        pytest.skip("this PyTorch has nccl")
    with pytest.raises(ConfigError, match="payloads on cuda:0 need a PyTorch with nccl"):
        dist.listen(ListenSpec(0, 1, LAYOUT), Carriage(torch.device("cuda", 0)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_says_so_when_asked_for_symm():
    for act in (
        lambda: connect.listen("symm", expert=0, attention_nodes=1, layout=LAYOUT),
        lambda: connect.connect(["symm:127.0.0.1:1"], attention=0, layout=LAYOUT, timeout=PATIENCE),
    ):
        with pytest.raises(ConfigError, match="symm is for GPUs of one host, and this machine has no CUDA"):
            act()


def test_a_mailbox_elsewhere_keeps_only_its_header_in_host_memory():
    """As on a GPU: the device `meta` has sizes and no bytes."""
    segment = record_segment(SegmentMap(LAYOUT, 0, 1), torch.device("meta"))
    inbox = segment.mailbox(BOX, Kind.DISPATCH)
    assert inbox.payload_B.device.type == "meta" and len(inbox.record) == HEADER_BYTES + LONGEST_REASON
    parcel = inbox.stage(Header(Kind.DISPATCH, 3, 1, 0, 2, LAYOUT.dispatch_wire))
    assert parcel.x_RH.shape == (2, LAYOUT.hidden) and parcel.x_RH.device.type == "meta"
    assert inbox.staged_bytes == inbox.frame.payload(2)


def test_a_device_waits_for_payloads_inside_the_queue_that_it_was_given():
    """So that no other queue of the device waits: asked for one attention node, before it comes and after."""
    inside, log = [], []

    @contextmanager
    def queue():
        inside.append(True)
        yield
        inside.pop()

    class Watched(group_pair.GlooPair):
        def receive(self, payload_B, tag, limit):
            log.append(bool(inside))
            super().receive(payload_B, tag, limit)

    way = Carriage(torch.device("cpu"), inline_most=0, open=Watched)
    end, address = dist.listen(ListenSpec(0, 2, LAYOUT), way)
    end.take_in(1, queue)
    fronts = [dist.connect(Connecting({0: address}, a, LAYOUT, PATIENCE), way) for a in (0, 1)]
    try:
        for turn, a in enumerate((0, 1, 1)):
            box = Box(a, 0, 0)
            send(fronts[a], box, 10 * turn + 1, 3)
            arrive(end, box)
            answer(end, box, end.take(box).header, 9)
            arrive(fronts[a], box)
    finally:
        for front_end in fronts:
            front_end.close()
        end.close()
    assert [seen for seen in log if seen] == [True, True] and False in log
