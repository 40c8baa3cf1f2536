"""KV events over real sockets: vLLM's messages by the order of its classes' fields, lost ones asked for again."""

import contextlib
import hashlib
import random
import socket
import time

import pytest

zmq, msgpack, cbor2 = pytest.importorskip("zmq"), pytest.importorskip("msgpack"), pytest.importorskip("cbor2")

from afserve.control.node.kv_event_words import EventWords  # noqa: E402
from afserve.control.node.kv_events import END, KvEventPublisher  # noqa: E402
from afserve.engine.kv.blocks import BlockPool  # noqa: E402
from afserve.engine.kv.events import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent, CacheEvents  # noqa: E402
from afserve.kv_events_config import EventEndpoint, KvEventsConfig  # noqa: E402

SIZE, SECONDS = 4, 20.0


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Receiver:
    """Follows a publisher as subscribers of vLLM do; `loses` messages by number at first."""

    def __init__(self, context, config, loses=()):
        self.news, self.replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.news.connect(config.endpoint.text)
        self.news.subscribe(config.topic.encode())
        self.replay.connect(config.replay.text)
        for one in (self.news, self.replay):
            one.rcvtimeo, one.linger = int(1000 * SECONDS), 0
        self.next, self.blocks, self.loses, self.asked = 0, set(), set(loses), 0

    def hear(self):
        _, number, batch = self.news.recv_multipart()
        count = int.from_bytes(number, "big")
        if count in self.loses:
            self.loses.remove(count)
            return
        if count > self.next:
            self.ask()
        elif count == self.next:
            self.take(batch)

    def ask(self):
        self.asked += 1
        self.replay.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            _, number, batch = self.replay.recv_multipart()
            if number == END:
                return
            if int.from_bytes(number, "big") == self.next:
                self.take(batch)

    def take(self, batch):
        stamp, events, node = msgpack.unpackb(batch)
        assert abs(stamp - time.time()) < 3600 and node == 0
        for event in events:
            match event:
                case ["BlockStored", hashes, parent, tokens, size, None, "GPU", None, _]:
                    assert len(tokens) == size * len(hashes) and not self.blocks & set(hashes)
                    assert parent is None or parent in self.blocks
                    self.blocks |= set(hashes)
                case ["BlockRemoved", hashes, "GPU"]:
                    assert set(hashes) <= self.blocks
                    self.blocks -= set(hashes)
                case ["AllBlocksCleared"]:
                    self.blocks.clear()
                case _:
                    pytest.fail(f"no event of vLLM's: {event}")
        self.next += 1


@pytest.fixture
def config():
    port = free_port()
    return KvEventsConfig(
        EventEndpoint(f"tcp://127.0.0.1:{port}"), EventEndpoint(f"tcp://127.0.0.1:{free_port()}"), "kv@test"
    )


def told_name(name):
    return int.from_bytes(name[-8:], "big")


@pytest.mark.slow
def test_a_receiver_that_loses_messages_has_the_cache_again(config):
    """400 blocks come and go; messages that were sent before it listened, and those that it lost, are asked for."""
    pool, draw = BlockPool(600, SIZE), random.Random(3)
    events = CacheEvents(pool)
    known: list[bytes] = []
    publisher = KvEventPublisher(config, events, 0, SIZE)
    with zmq.Context() as context:
        receiver = Receiver(context, config, loses=range(5, 60, 3))
        for count in range(400):
            if known and draw.random() < 0.4:
                events.gone(known.pop(draw.randrange(len(known))))
            else:
                name = draw.randbytes(16)
                pool.publish(pool.allocate(1)[0], name)
                events.stored([name], range(SIZE), 0, 1, "")
                known.append(name)
            publisher.publish_news()
            if count % 10 == 9:
                time.sleep(0.002)
        until = time.monotonic() + SECONDS
        while receiver.next < publisher._sent or publisher._queue.qsize():
            assert time.monotonic() < until, (receiver.next, publisher._sent)
            if receiver.news.poll(100):
                receiver.hear()
            else:
                receiver.ask()
        assert receiver.blocks == {told_name(name) for name in known} and receiver.asked
        receiver.news.close()
        receiver.replay.close()
        publisher.stop_publishing()
    assert not publisher._thread.is_alive()


def test_a_question_of_another_form_is_passed_over(config):
    publisher = KvEventPublisher(config, CacheEvents(BlockPool(4, SIZE)), 0, SIZE)
    with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.linger, asker.rcvtimeo = 0, int(1000 * SECONDS)
        asker.connect(config.replay.text)
        for frames in ([b"x"], [b"", b"1"], [b"", b"", b""], [b"no", b"\0" * 8]):
            asker.send_multipart(frames)
        publisher.publish_news()
        asker.send_multipart([b"", b"\0" * 8])
        answers = [asker.recv_multipart()]
        while answers[-1][1] != END:
            answers.append(asker.recv_multipart())
        asker.close()
        publisher.stop_publishing()
    assert all(answer[0] == b"" for answer in answers)


@pytest.mark.slow
def test_a_port_that_is_taken_costs_events_only(config, caplog):
    """Serving goes on, and what was told meanwhile comes once the port is free."""
    pool, name = BlockPool(4, SIZE), b"a" * 16
    events = CacheEvents(pool)
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(config.endpoint.text.rpartition(":")[2])))
        other.listen()
        publisher = KvEventPublisher(config, events, 0, SIZE)
        pool.publish(pool.allocate(1)[0], name)
        events.stored([name], range(SIZE), 0, 1, "")
        publisher.publish_news()
        until = time.monotonic() + SECONDS
        while "Address already in use" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert f"KV events: {config.endpoint.text}: " in caplog.text and publisher._sent == 0
    while not publisher._sent:
        assert time.monotonic() < until
        time.sleep(0.01)
    publisher.stop_publishing()


@pytest.mark.slow
def test_a_fault_is_said_and_everything_is_told_anew(config, caplog):
    """What was queued behind the fault is told to nobody, and the thread goes on."""
    pool = BlockPool(8, SIZE)
    events = CacheEvents(pool)
    publisher = KvEventPublisher(config, events, 0, SIZE)
    until = time.monotonic() + SECONDS
    with zmq.Context() as context:
        receiver = Receiver(context, config)
        publisher.publish_news()
        for news in ([BlocksRemoved((b"nobody",))], [BlocksStored((b"b",), b"nobody", (1, 2, 3, 4), "")]):
            publisher._queue.put(news)
        while not publisher._broken.is_set():
            assert time.monotonic() < until
            time.sleep(0.01)
        name = b"a" * 16
        pool.publish(pool.allocate(1)[0], name)
        publisher.publish_news()  # everything that was told is void; blocks come when they are used next
        events.stored([name], range(SIZE), 0, 1, "")
        publisher.publish_news()
        receiver.replay.rcvtimeo = 1000  # a question that lies in the socket that the fault closes is lost
        until = time.monotonic() + SECONDS
        while receiver.blocks != {told_name(name)}:
            assert time.monotonic() < until
            with contextlib.suppress(zmq.Again):
                receiver.ask()
            time.sleep(0.02)
        receiver.news.close()
        receiver.replay.close()
        publisher.stop_publishing()
    assert "sending KV events failed" in caplog.text and publisher._sent == 3


def test_no_more_is_kept_than_some_bytes(config, monkeypatch):
    monkeypatch.setattr("afserve.control.node.kv_events._MOST_KEPT", 100)
    publisher = KvEventPublisher(config, CacheEvents(BlockPool(4, SIZE)), 0, SIZE)
    publisher.stop_publishing()
    for number in range(9):
        publisher._keep(bytes([number]), b"x" * 30)
    publisher._keep(b"long", b"x" * 500)
    assert [number for number, _ in publisher._kept] == [b"long"] and publisher._kept_bytes == 500


def test_what_finds_no_room_in_the_queue_begins_anew(config):
    few = KvEventsConfig(config.endpoint, max_queue_size=1)
    events = CacheEvents(BlockPool(4, SIZE))
    publisher = KvEventPublisher(few, events, 0, SIZE)
    publisher.stop_publishing()
    for _ in range(3):
        publisher.publish_news()
        events.begin_anew()
    assert publisher._queue.qsize() == 1 and events.take_news() == [BlocksCleared()]


def test_names_are_vllms_where_its_seed_is_given():
    """By sha256_cbor: the digest of (parent, tokens, extra keys), of which the last 64 bits are told."""
    config = KvEventsConfig(EventEndpoint("tcp://127.0.0.1:1"), hash_seed="0")
    words = EventWords(config, 2, SIZE)

    def digest(value):
        return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()

    first = digest((digest("0"), (1, 2, 3, 4), ("salt",)))
    second = digest((first, (5, 6, 7, 8), None))
    third = digest((second, (9, 10, 11, 12), None))
    told: list[CacheEvent] = [
        BlocksStored((b"a", b"b"), None, tuple(range(1, 9)), "salt"),
        BlocksRemoved((b"b",)),
        BlocksStored((b"c",), b"b", (9, 10, 11, 12), "salt", tuple(range(1, 9))),
    ]
    _, events, node = msgpack.unpackb(words.batch(1.0, told))
    assert node == 2
    assert events[0][1:3] == [[told_name(first), told_name(second)], None] and events[0][8] == [
        ["salt"],
        None,
    ]
    assert events[1][1] == [told_name(second)]
    assert events[2][1:3] == [[told_name(third)], told_name(second)]


def test_as_a_map_fields_have_their_names():
    words = EventWords(KvEventsConfig(EventEndpoint("tcp://127.0.0.1:1"), encoding="map"), 0, SIZE)
    batch = msgpack.unpackb(
        words.batch(1.0, [BlocksCleared(), BlocksStored((b"a",), None, (1, 2, 3, 4), "")])
    )
    assert batch["ts"] == 1.0 and batch["data_parallel_rank"] == 0
    assert batch["events"][0] == {"type": "AllBlocksCleared"}
    stored = batch["events"][1]
    assert (
        stored["type"] == "BlockStored"
        and stored["token_ids"] == [1, 2, 3, 4]
        and stored["block_size"] == SIZE
    )
    assert stored["parent_block_hash"] is None and stored["medium"] == "GPU" and stored["lora_name"] is None
