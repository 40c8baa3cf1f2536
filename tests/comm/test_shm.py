"""Shared memory between real processes: a killed peer is named, its place can be taken, nothing is left behind."""

import os
import signal
import time
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest

from afserve.comm.transport import Box, WireType
from afserve.comm.transports import connect
from afserve.errors import ConfigError, PeerLost, RendezvousError
from tests.comm.begun import FORKED
from tests.comm.conformance import LAYOUT, PATIENCE, answer, arrive, content, send
from tests.open_files import mapped_memory, open_files

BOX = Box(0, 0, 0)


def echo(pipe):
    """An expert node that answers until it is killed."""
    end, address = connect.listen("shm", expert=0, attention_nodes=2, layout=LAYOUT)
    pipe.send(address)
    while True:
        for box in end.wait(end.boxes(), 1.0):
            answer(end, box, end.take(box).header, 9)


def front(address, pipe, rounds):
    """An attention node that says that it is there, makes some round trips, says so, and stays in the middle of the
    next one."""
    end = connect.connect([address], attention=1, layout=LAYOUT, timeout=60.0)
    pipe.send("here")
    box = Box(1, 0, 0)
    for turn in range(rounds):
        send(end, box, turn, 3)
        arrive(end, box)
    send(end, box, 40, 3)
    pipe.send(end.next_sequence(box))
    signal.pause()


@pytest.fixture
def start():
    """start(target, *args): a process and the first thing it says; all are killed at the end."""
    started = []

    def run(target, *args):
        mine, theirs = FORKED.Pipe()
        full = (*args[:1], theirs, *args[1:]) if args else (theirs,)
        process = FORKED.Process(target=target, args=full, daemon=True)
        process.start()
        started.append(process)
        assert mine.poll(60), f"{target.__name__} said nothing"
        return process, mine.recv()

    yield run
    for process in started:
        process.kill()
        process.join()


@pytest.mark.process
def test_a_killed_expert_node_is_named(start):
    process, address = start(echo)
    end = connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    for turn in range(50):
        send(end, BOX, turn, 4)
        assert (arrive(end, BOX).x_RH == content(9, 4, LAYOUT.hidden)).all()
    process.kill()
    began = time.monotonic()
    with pytest.raises(PeerLost, match=f"expert-0: its process {process.pid} has ended"):
        while time.monotonic() - began < 60:
            end.wait([BOX], 5.0)
    with pytest.raises(PeerLost):
        send(end, BOX, 1, 1)
    end.close()


@pytest.mark.process
def test_a_killed_attention_nodes_place_can_be_taken(start):
    end, address = connect.listen("shm", expert=0, attention_nodes=2, layout=LAYOUT)
    box = Box(1, 0, 0)
    process = FORKED.Process(target=front, args=(address, (pipe := FORKED.Pipe())[1], 3), daemon=True)
    process.start()
    assert pipe[0].poll(60) and pipe[0].recv() == "here", (
        "a process may take longer to begin than a message to come"
    )
    for _ in range(3):
        answer(end, box, arrive(end, box).header, 1)
    assert pipe[0].poll(60)
    following = pipe[0].recv()
    unanswered = arrive(end, box)
    with pytest.raises(
        RendezvousError, match=f"attention-1 is already connected to expert-0 as process {process.pid}"
    ):
        connect.connect([address], attention=1, layout=LAYOUT, timeout=0.05)
    process.kill()
    process.join()
    with pytest.raises(PeerLost, match=f"attention-1: its process {process.pid} has ended"):
        end.wait([box], 30.0)
    assert end.wait([box], 0.01) == [], "a loss is raised once"
    successor = connect.connect([address], attention=1, layout=LAYOUT, timeout=PATIENCE)
    assert successor.next_sequence(box) == following + 1
    answer(end, box, unanswered.header, 2)
    assert successor.wait([box], 0.05) == []
    sent = send(successor, box, 5, 2)
    got = arrive(end, box)
    assert got.header == sent.header
    answer(end, box, got.header, 3)
    assert (arrive(successor, box).x_RH == content(3, 2, LAYOUT.hidden)).all()
    successor.close()
    with pytest.raises(PeerLost, match="attention-1: it has left"):
        end.wait([box], 30.0)
    end.close()


@pytest.mark.process
def test_a_waiting_end_uses_no_processor(start):
    """It is asleep almost always when it is looked at. Who looks without sleeping never is, whoever has the core."""
    process, address = start(echo)
    end = connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    for turn in range(20):
        send(end, BOX, turn, 4)
        arrive(end, BOX)
    end.wait([BOX], 0.2)  # it looks more often at first
    seen = Counter()
    for _ in range(60):
        end.wait([BOX], 0.01)
        seen[state_of(process.pid)] += 1
    assert seen["S"] > 40, seen
    end.close()


def state_of(pid):
    """`R`: it runs or would like to, `S`: it sleeps."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def other(name):
    value = getattr(LAYOUT, name)
    return WireType.BFLOAT16 if name.endswith("_wire") else value + 1


@pytest.mark.parametrize("kind", ["local", "shm"])
@pytest.mark.parametrize("field", [f.name for f in fields(LAYOUT)])
def test_a_mismatch_names_the_rank_and_the_field(kind, field):
    theirs = replace(LAYOUT, **{field: other(field)})
    good, address = connect.listen(kind, expert=0, attention_nodes=1, layout=LAYOUT)
    bad, wrong = connect.listen(kind, expert=1, attention_nodes=1, layout=theirs)
    with pytest.raises(RendezvousError, match=f"expert-1 and attention-0 do not agree: {field} is "):
        connect.connect([address, wrong], attention=0, layout=LAYOUT, timeout=PATIENCE)
    good.close()
    bad.close()


@pytest.mark.parametrize("kind", ["local", "shm"])
def test_addresses_in_the_wrong_order_and_too_many_nodes(kind):
    pairs = [connect.listen(kind, expert=f, attention_nodes=1, layout=LAYOUT) for f in range(2)]
    addresses = [address for _, address in pairs]
    with pytest.raises(RendezvousError, match="expert is 1 there and 0 here"):
        connect.connect(addresses[::-1], attention=0, layout=LAYOUT, timeout=PATIENCE)
    with pytest.raises(RendezvousError, match="attention_nodes is 1 there and 2 here"):
        connect.connect(addresses, attention=1, layout=LAYOUT, timeout=PATIENCE)
    for end, _ in pairs:
        end.close()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("shm:1:x", "not an address"),
        ("shm:1", "not an address"),
        ("shm:999999999:3", "cannot be opened"),
        ("shm:{pid}:1", "what lies at its address|cannot be opened"),
    ],
)
def test_a_wrong_address_is_named(address, reason):
    with pytest.raises(RendezvousError, match=f"expert-0: .*({reason})"):
        connect.connect([address.format(pid=os.getpid())], attention=0, layout=LAYOUT, timeout=0.1)


def test_memory_that_could_be_cut_short_is_refused():
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    with pytest.raises(RendezvousError, match="could be cut short"):
        connect.connect([f"shm:{os.getpid()}:{fd}"], attention=0, layout=LAYOUT, timeout=0.1)
    os.close(fd)


def test_unknown_and_mixed_transports_are_refused():
    with pytest.raises(ConfigError, match="transport: 'smoke' is not one of local, shm"):
        connect.listen("smoke", expert=0, attention_nodes=1, layout=LAYOUT)
    with pytest.raises(RendezvousError, match="different transports: local, shm"):
        connect.connect(["shm:1:2", "local:0"], attention=0, layout=LAYOUT, timeout=0.1)
    with pytest.raises(RendezvousError, match="no expert node"):
        connect.connect([], attention=0, layout=LAYOUT, timeout=0.1)
    with pytest.raises(ConfigError, match="hidden = 0 is outside"):
        connect.listen("shm", expert=0, attention_nodes=1, layout=replace(LAYOUT, hidden=0))


def test_nothing_is_left_behind():
    files, mapped, names = open_files(), mapped_memory(), set(os.listdir("/dev/shm"))
    for _ in range(3):
        end, address = connect.listen("shm", expert=0, attention_nodes=1, layout=LAYOUT)
        front_end = connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
        send(front_end, BOX, 1, 2)
        arrive(end, BOX)
        front_end.close()
        end.close()
    del end, front_end
    assert not open_files() - files and not mapped_memory() - mapped
    new, until = set(os.listdir("/dev/shm")) - names, time.monotonic() + 30
    while left := set(os.listdir("/dev/shm")) & new:  # others' names there go again
        assert time.monotonic() < until, left
        time.sleep(0.01)
