"""KV blocks through process groups: who does not come, dies or is wrong costs its own transfers, and nothing stays."""

import itertools
import os
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.comm.kv.carriers.carrier import Memory
from afserve.comm.kv.carriers.table import lacking, open_carrier
from afserve.errors import ConfigError
from tests.comm.kv_world import BLOCK, chain, content
from tests.comm.test_kv_carriers import CarriedEnd, until

if why := lacking("dist"):
    pytest.skip(why, allow_module_level=True)

from afserve.comm.kv.carriers import dist, dist_pair

SLOT = 4096
HOST = "127.0.0.1"


class Gloo:
    """What `CarriedEnd` takes for a library."""

    def carrier(self, memory):
        return open_carrier("dist", HOST, memory)


class Two:
    """An owner (peer 1 of the other) and a reader (peer 2 of the other), and their connection."""

    def __init__(self, hosts=(HOST, HOST)) -> None:
        self.memories = [Memory(16 * SLOT), Memory(16 * SLOT)]
        ends = zip(hosts, self.memories, strict=True)
        self.owner, self.reader = (open_carrier("dist", host, memory) for host, memory in ends)
        self.done = {}
        self.marks = itertools.cycle(range(1, 256))

    def move(self, *, deaf=False):
        """What each end has said is heard, unless the reader is deaf; reads that have ended."""
        for _, what in self.owner.said():
            if not deaf:
                self.reader.heard(1, what)
        for _, what in self.reader.said():
            self.owner.heard(2, what)
        for one in self.reader.ended():
            assert one.read not in self.done, "it has ended twice"
            self.done[one.read] = one.why

    def lend(self, slot, length):
        """The number of the read, and what comes if it does."""
        at = slot * SLOT
        right = bytes([next(self.marks)]) * length
        self.memories[0].view[at : at + length] = right
        where = self.owner.lend(2, at, length)
        return self.reader.read(1, where, at, at, length), at, right

    def until(self, done, seconds=60.0):
        late = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < late, "it does not end"
            self.move()
            time.sleep(0.001)

    def close(self):
        self.owner.close()
        self.reader.close()


@pytest.fixture
def two():
    ends = Two()
    yield ends
    ends.close()


def groups():
    return [thread for thread in threading.enumerate() if thread.name == "kv-dist"]


def kernel_threads():
    return set(os.listdir("/proc/self/task"))


def listening():
    """Addresses on which this process listens, IPv4 and IPv6, as the kernel writes them."""
    held = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if Path(f"/proc/self/fd/{fd}").exists()
    }
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                found.add(fields[1].partition(":")[0])
    return found


def test_what_is_lent_arrives_and_a_peer_that_leaves_takes_its_groups_along(two):
    threads = kernel_threads()
    reads = [two.lend(slot, SLOT - slot) for slot in range(8)]
    two.until(lambda: len(two.done) == 8)
    assert set(two.done.values()) == {""}
    for _, at, right in reads:
        assert two.memories[1].view[at : at + len(right)] == right
    assert len(groups()) == 2 and kernel_threads() - threads
    two.owner.left(2)
    two.reader.left(1)
    two.until(lambda: not groups() and kernel_threads() <= threads)  # some of before may have ended


def test_nothing_listens_but_on_the_addresses_that_were_given():
    hosts = "127.0.0.4", "127.0.0.5"
    asked = {socket.inet_aton(host)[::-1].hex().upper() for host in hosts}
    before = listening()
    with closing(Two(hosts)) as two:
        two.lend(0, SLOT)
        two.until(lambda: two.done)
        two.until(lambda: listening() >= asked)  # the kernel's table may lack a line while others come and go
        assert listening() - before == asked


def test_an_address_of_another_host_is_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"--kv-transport dist: gloo cannot listen on 192\.0\.2\.1 .* sockets"
    ):
        open_carrier("dist", "192.0.2.1", Memory(SLOT))


@pytest.mark.slow
def test_who_does_not_come_to_meet_is_given_up_and_met_anew(two, monkeypatch):
    monkeypatch.setattr(dist_pair, "MEET_SECONDS", 0.2)
    number, *_ = two.lend(0, SLOT)
    while number not in two.done:
        two.move(deaf=True)
    assert "has not come to meet it" in two.done[number]
    two.until(lambda: not groups())
    number, at, right = two.lend(0, SLOT)
    two.until(lambda: number in two.done)
    assert two.done[number] == "" and two.memories[1].view[at : at + SLOT] == right


def test_a_payload_that_nobody_receives_ends_its_group_and_the_next_is_lent_in_another(two, monkeypatch):
    two.lend(0, SLOT)
    two.until(lambda: two.done)
    monkeypatch.setattr(dist, "SEND_SECONDS", 0.2)
    two.owner.left(2)
    first, *_ = two.lend(0, SLOT)
    two.until(lambda: first in two.done)
    name = two.owner.lend(2, SLOT, SLOT)  # read by nobody
    sender = two.owner._lent[2]
    two.until(lambda: not sender.is_alive())
    number, at, right = two.lend(2, SLOT)
    assert two.owner._lent[2].group_name != name
    two.until(lambda: number in two.done)
    assert two.done[number] == "" and two.memories[1].view[at : at + SLOT] == right


def test_a_payload_that_does_not_come_ends_the_reads_of_its_group(two, monkeypatch):
    monkeypatch.setattr(dist, "RECEIVE_SECONDS", 0.2)
    first, at, _ = two.lend(0, SLOT)
    two.until(lambda: first in two.done)
    where = two.owner._lent[2].group_name
    reads = [two.reader.read(1, where, slot * SLOT, slot * SLOT, SLOT) for slot in (3, 4)]
    two.until(lambda: all(number in two.done for number in reads))
    assert all("their group has ended: Timed out" in two.done[number] for number in reads)
    late = two.reader.read(1, where, at, at, SLOT)
    two.move()
    assert two.done[late]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_reads_end_also_when_a_thread_fails_in_a_way_that_nobody_foresaw(two, monkeypatch):
    def broken(*_):
        raise TypeError("gloo takes something else now")

    monkeypatch.setattr(dist_pair, "open_gloo", broken)
    number, *_ = two.lend(0, SLOT)
    two.until(lambda: number in two.done)
    assert two.done[number] == "its thread has failed"
    two.until(lambda: not groups())


def test_an_end_that_closes_waits_for_nobody(two, monkeypatch):
    monkeypatch.setattr(dist_pair, "MEET_SECONDS", 60.0)
    for slot in range(4):
        two.lend(slot, SLOT)
    two.until(lambda: len(two.done) == 4)
    where = two.owner._lent[2].group_name
    two.reader.read(1, where, 9 * SLOT, 9 * SLOT, SLOT)
    two.owner.lend(3, 0, SLOT)  # somebody who never meets it
    began = time.monotonic()
    two.close()
    assert time.monotonic() - began < 30.0 and not groups()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 15), st.integers(1, SLOT)),
            st.sampled_from(["owner left", "reader left", "moved"]),
        ),
        max_size=24,
    )
)
def test_every_read_ends_once_and_brings_what_was_lent_or_says_why(steps):
    lost = "owner left" in steps or "reader left" in steps
    with pytest.MonkeyPatch.context() as patched:
        if lost:  # then somebody waits for who has gone
            patched.setattr(dist_pair, "MEET_SECONDS", 0.2)
        done = play(steps)
    assert lost or set(done.values()) <= {""}


def play(steps):
    two, reads, busy = Two(), {}, set()
    try:
        for step in steps:
            if isinstance(step, tuple) and step[0] not in busy:
                busy.add(step[0])
                number, at, right = two.lend(*step)
                reads[number] = at, right
            elif step == "owner left":
                two.owner.left(2)
            elif step == "reader left":
                two.reader.left(1)
            two.move()
        two.until(lambda: len(two.done) == len(reads))
        for number, (at, right) in reads.items():
            assert two.done[number] or two.memories[1].view[at : at + len(right)] == right
    finally:
        two.close()
    assert not groups()
    return two.done


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 200), st.booleans())
def test_what_no_peer_says_harms_nobody(noise, kept, behind):
    """gloo itself ends the process for an address that was cut."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist_pair, "MEET_SECONDS", 0.1)
        hear(noise, kept, behind)


def hear(noise, kept, behind):
    two = Two()
    try:
        number, at, right = two.lend(0, SLOT)
        two.reader.heard(1, noise)
        two.owner.heard(2, noise)
        reader = two.reader._reads[1]
        address = []
        while not address:
            address = two.reader.said()
        spoiled = address[0][1][: dist._SAID.size + 3 + kept] + noise * behind
        two.owner.heard(2, spoiled)
        two.until(lambda: number in two.done or not two.owner._lent[2].is_alive())
        assert two.done.get(number, "why") or two.memories[1].view[at : at + SLOT] == right
        assert reader.group_name == two.owner._lent[2].group_name
    finally:
        two.close()


@pytest.mark.slow
def test_many_peers_at_once_beside_one_that_never_reads(monkeypatch):
    monkeypatch.setattr("afserve.comm.kv.messages.PIECE_BYTES", 7 * BLOCK)
    owner, *pullers = (CarriedEnd(Gloo(), "dist") for _ in range(6))
    ends = [owner, *pullers]
    try:
        names = chain(1, 200)
        owner.store.compute(names)
        deaf, heard = pullers[0].carrier, pullers[0].carrier.heard
        monkeypatch.setattr(deaf, "heard", lambda peer, what: None)
        for end in pullers:
            end.exchange.pull(owner.wires.address, names, 10.0, request=0, generation=3)
        until(lambda: all(end.exchange.ended for end in pullers), *ends)
        first, *others = (end.exchange.ended.pop() for end in pullers)
        assert "nothing came for 1 s" in first.why and first.received == 0
        assert [one.why for one in others] == ["complete"] * 4
        for end in pullers[1:]:
            blocks = end.store.pool.match(names)
            assert [end.store.memory[block] for block in blocks] == [content(name) for name in names]
        monkeypatch.setattr(deaf, "heard", heard)
        until(lambda: not owner.exchange.lending and not owner.wires._to_place, *ends)
        pullers[0].exchange.pull(owner.wires.address, names, 10.0, request=0, generation=3)
        until(lambda: pullers[0].exchange.ended, *ends)
        assert pullers[0].exchange.ended.pop().complete
    finally:
        for end in ends:
            end.exchange.close()
    assert not groups()
