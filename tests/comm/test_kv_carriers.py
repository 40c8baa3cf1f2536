"""KV blocks whose payloads a library carries: what it brings wrong, late or not at all ends the pull."""

import sys
import threading
import time

import psutil
import pytest

from afserve.clock import MonotonicClock
from afserve.comm.kv.carriers import carried
from afserve.comm.kv.carriers.carried import OF_A_PEER, SLOTS, CarriedWires, memory_for
from afserve.comm.kv.carriers.carrier import Ended, Memory, OneSided
from afserve.comm.kv.carriers.table import CARRIERS, lacking, open_carrier
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.forms import decode, decode_head, encode
from afserve.comm.kv.messages import PIECE_BYTES, Fetched, Piece, Placed, Told
from afserve.comm.kv.reach import listen_here
from afserve.comm.kv.socket_wires import SocketWires
from afserve.config import KV_TRANSPORTS, SOCKETS
from afserve.errors import ConfigError, ProtocolError
from afserve.launch.plan.hosts import HostedNode
from afserve.launch.plan.transports import check_kv_transport
from afserve.member import attention_node, expert_node
from tests.comm import carried_end
from tests.comm.begun import FORKED
from tests.comm.kv_world import BLOCK, Store, chain, content


class Library:
    """All carriers of one test. `how` the next reads go: right, wrong, fails, hangs."""

    def __init__(self) -> None:
        self.memories: dict[bytes, Memory] = {}
        self.how = "right"
        self.most = 0

    def carrier(self, memory: Memory) -> "Carrier":
        return Carrier(self, memory)


class Carrier(OneSided):
    def __init__(self, library: Library, memory: Memory) -> None:
        self.library, self.memory = library, memory
        self.where = b"memory %d" % len(library.memories)
        library.memories[self.where] = memory
        self.reads: dict[int, tuple[int, memoryview]] = {}
        self.hung: dict[int, str] = {}
        self.forgotten: list[bytes] = []
        self.number = 0

    def read(self, peer, where, at, into, length):
        self.number += 1
        self.reads[self.number] = into, self.library.memories[where].view[at : at + length]
        self.library.most = max(self.library.most, len(self.reads))
        return self.number

    def ended(self):
        found = []
        for number, (into, source) in list(self.reads.items()):
            if self.library.how == "hangs":
                continue
            del self.reads[number]
            if self.library.how == "fails":
                found.append(Ended(number, "no route to its memory"))
                continue
            self.memory.view[into : into + len(source)] = source
            self.memory.view[into] ^= self.library.how == "wrong"
            found.append(Ended(number))
        return found

    def forget(self, where):
        self.forgotten.append(where)

    def close(self):
        self.reads.clear()


class CarriedEnd:
    """A node's exchange over carried wires, with a store; turned by the test."""

    def __init__(self, library: Library, transport: str = "library") -> None:
        self.news = threading.Event()
        memory = memory_for(BLOCK)
        self.carrier = library.carrier(memory)

        def connected(wake):
            return SocketWires(listen_here(), "secret", {"transport": transport}, BLOCK, wake)

        self.wires = CarriedWires(connected, self.carrier, memory, BLOCK, self.news.set, MonotonicClock())
        self.wires.start()
        self.store = Store(400)
        self.exchange = Exchange(self.store, self.wires, MonotonicClock(), 3)


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr("afserve.comm.kv.messages.PIECE_BYTES", 7 * BLOCK)
    return Library()


@pytest.fixture
def opened(library):
    ends = []

    def make(**fields):
        ends.append(CarriedEnd(library, **fields))
        return ends[-1]

    yield make
    for end in ends:
        end.exchange.close()
        assert not +end.store.held


def until(done, *ends):
    for _ in range(4000):
        for end in ends:
            end.exchange.turn(1.0)
        if done():
            return
        ends[0].news.wait(0.005)
        ends[0].news.clear()
    raise AssertionError("nothing comes")


def pulled(here, owner, names):
    here.exchange.pull(owner.wires.address, names, 10.0, request=0, generation=3)
    until(lambda: here.exchange.ended, here, owner)
    return here.exchange.ended.pop()


def test_blocks_arrive_through_fewer_slots_than_there_are_pieces(opened, library):
    here, owner = opened(), opened()
    names = chain(1, 300)
    owner.store.compute(names)
    assert SLOTS < -(-300 // 7)
    assert pulled(here, owner, names).complete
    blocks = here.store.pool.match(names)
    assert [here.store.memory[block] for block in blocks] == [content(name) for name in names]
    assert library.most <= OF_A_PEER
    until(lambda: not owner.exchange.lending, here, owner)
    until(lambda: len(owner.wires._free_out) == len(here.wires._free_in) == SLOTS, here, owner)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("wrong", "are not what was sent"),
        ("fails", "did not come: no route to its memory"),
        ("hangs", "nothing came for 1 s"),
    ],
)
def test_what_a_library_does_not_bring_right_ends_the_pull(opened, library, how, why):
    here, owner = opened(), opened()
    names = chain(1, 300)
    owner.store.compute(names)
    library.how = how
    found = pulled(here, owner, names)
    assert why in found.why and found.received == 0
    assert here.store.pool.match(names) == []
    library.how = "right"
    until(lambda: not owner.exchange.lending, here, owner)
    assert pulled(here, owner, names).complete


@pytest.mark.slow
def test_slots_come_back_from_a_puller_that_says_nothing_and_from_one_that_has_gone(
    opened, library, monkeypatch
):
    monkeypatch.setattr(carried, "LENT_SECONDS", 0.2)
    here, owner = opened(), opened()
    names = chain(1, 300)
    owner.store.compute(names)
    library.how = "hangs"
    here.exchange.pull(owner.wires.address, names, 10.0, request=0, generation=3)
    until(lambda: here.carrier.reads, here, owner)
    until(lambda: not owner.wires._to_place, here, owner)
    until(lambda: len(owner.wires._free_out) == SLOTS, here, owner)
    owner.exchange.close()
    until(lambda: here.exchange.ended, here)
    library.how = "right"
    until(lambda: here.carrier.forgotten == [owner.carrier.where], here)
    assert len(here.wires._free_in) == SLOTS and not here.exchange.ended.pop().complete


def test_ends_that_carry_otherwise_are_refused_by_name(opened):
    here, owner = opened(), opened(transport="sockets")
    owner.store.compute(chain(1, 3))
    assert "transport is sockets there and library here" in pulled(here, owner, chain(1, 3)).why


def test_places_are_said_and_checked():
    for message in (Placed(7, 1, 2, 5, 1 << 40, b"address and port"), Fetched(7, 1 << 40), Told(0, b"x")):
        head, body = encode(message)
        assert decode(decode_head(head, BLOCK), bytes(body)) == message
    head, _ = encode(Placed(7, 0, (1 << 16) + 1, 5, 0, b"address and port"))
    with pytest.raises(ProtocolError, match="a Placed of 65537 blocks"):
        decode_head(head, BLOCK)
    for what in (b"", bytes(5000)):
        head, _ = encode(Told(0, what))
        with pytest.raises(ProtocolError, match=f"a Told .* with {len(what)} bytes"):
            decode_head(head, BLOCK)
    head, _ = encode(Placed(7, 1, 1, 5, 0, b"short"))
    with pytest.raises(ProtocolError, match="a Placed of 1 blocks from 1 on with 5 bytes"):
        decode_head(head, BLOCK)


def test_a_slot_holds_the_largest_piece():
    for block in (64, 147_456, 5_000_000):
        size = carried.slot_bytes(block)
        most = max(1, PIECE_BYTES // block) * block
        assert most <= size < most + 4096 and memory_for(block).size == 2 * SLOTS * size
    assert Piece(1, 0, 1, 2, b"x").payload == b"x"


def test_a_library_that_is_not_installed_is_named_with_the_way_to_get_it(monkeypatch):
    assert (SOCKETS, *CARRIERS) == KV_TRANSPORTS
    for name, module in {"mooncake": "mooncake.engine", "nixl": "nixl._api"}.items():
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(
            ConfigError, match=rf"--kv-transport {name}: not installed: pip install 'afserve\[{name}\]'"
        ):
            open_carrier(name, "127.0.0.1", Memory(4096))
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    with pytest.raises(ConfigError, match="--kv-transport dist: this PyTorch has no gloo"):
        open_carrier("dist", "127.0.0.1", Memory(4096))


def test_what_a_run_cannot_use_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr("afserve.launch.plan.transports.lacking", lambda name: "not installed")
    here = [HostedNode(attention_node(0), "a", True, "cpu"), HostedNode(expert_node(0), "b", False, "cpu")]
    check_kv_transport(SOCKETS, here, certified=True)
    with pytest.raises(
        ConfigError, match="--kv-transport nixl: its library neither encrypts nor asks who reads"
    ):
        check_kv_transport("nixl", here, certified=True)
    with pytest.raises(ConfigError, match="--kv-transport mooncake: not installed"):
        check_kv_transport("mooncake", here)
    check_kv_transport("mooncake", here[1:])


class Ends:
    """Processes of one test."""

    def __init__(self) -> None:
        self.begun = []

    def start(self, *args):
        """With what it will say."""
        mine, theirs = FORKED.Pipe()
        process = FORKED.Process(target=carried_end.run, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        self.begun.append(process)
        return process, mine

    def heard(self, *args):
        """What a new one says; it goes on."""
        _, pipe = self.start(*args)
        assert pipe.poll(250), "it says nothing"
        return pipe.recv()


@pytest.fixture
def ends():
    made = Ends()
    yield made
    for process in made.begun:
        process.kill()
        process.join()


def fallen(process):
    for _ in range(10_000):
        if not process.is_alive() or stopped(process.pid):
            return
        time.sleep(0.01)
    raise AssertionError("it goes on")


def stopped(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:  # it died since it was asked whether it lives
        return False


@pytest.mark.process
@pytest.mark.parametrize("name", CARRIERS)
@pytest.mark.parametrize(
    "what", ["", "spoils", "SIGKILL", "SIGSTOP"], ids=["whole", "spoils", "killed", "stopped"]
)
def test_the_libraries_themselves_between_two_processes(ends, name, what):
    if why := lacking(name):
        pytest.skip(f"{name}: {why}")
    address = ends.heard(name, "lend", *[what] * what.startswith("SIG"))
    found = ends.heard(name, address, *["spoils"] * (what == "spoils"))
    ends.begun[-1].join(20)
    assert ends.begun[-1].exitcode == 0
    assert found["right"] == found["received"]
    if not what:
        assert (found["why"], found["received"]) == ("complete", 40)
        return
    assert found["received"] < 40 and found["seconds"] < 15
    if what == "spoils":
        assert "are not what was sent" in found["why"] and found["received"] == 0


@pytest.mark.process
@pytest.mark.parametrize("name", CARRIERS)
@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"], ids=["killed", "stopped"])
def test_a_reader_that_falls_over_costs_the_owner_and_other_readers_nothing(ends, name, what):
    if why := lacking(name):
        pytest.skip(f"{name}: {why}")
    address = ends.heard(name, "lend")
    process, _ = ends.start(name, address, what)
    fallen(process)
    for _ in range(2):
        found = ends.heard(name, address)
        assert (found["why"], found["right"]) == ("complete", 40)
        assert found["seconds"] < 5
