"""One wait for memory and connections: nobody sleeps through a message, whichever way it comes and whenever."""

import random
import socket
import threading
import time

import pytest

from afserve.comm.mailbox import flags
from afserve.comm.native import native_library
from afserve.comm.transport import Box
from afserve.comm.transports import connect
from afserve.errors import PeerLost
from tests.comm.conformance import LAYOUT, answer, arrive, content, send
from tests.work import Calls

pytestmark = pytest.mark.skipif("pairs" not in connect.kinds(), reason="needs Linux")
PATIENCE = 30.0
ROUNDS = 40


def elsewhere(address):
    """As an attention node of another host reads it."""
    return address.replace("pairs:", "pairs:not-")


def without_belt(end):
    """Who sleeps through a message then sleeps through the test."""
    if end._near is not None:
        end._near.look_seconds = PATIENCE
    return end


@pytest.fixture(params=["native", "plain"])
def board(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(flags, "native_library", lambda: None)
    elif native_library() is None:
        pytest.skip("the native library is not built")


@pytest.fixture
def opened(board):
    ends = []

    def open_ends(experts, fronts):
        """`fronts` says for each attention node which expert nodes are on its host."""
        listening = [
            connect.listen("pairs", expert=f, attention_nodes=len(fronts), layout=LAYOUT)
            for f in range(experts)
        ]
        ends.extend(without_belt(end) for end, _ in listening)
        for a, near in enumerate(fronts):
            to = {f: at if f in near else elsewhere(at) for f, (_, at) in enumerate(listening)}
            ends.append(without_belt(connect.connect(to, attention=a, layout=LAYOUT, timeout=PATIENCE)))
        return ends[:experts], ends[experts:]

    yield open_ends
    for end in ends:
        end.close()


def answering(end, messages):
    """Answers what comes, in a thread of its own; a wait that nothing ends is an error."""
    errors = []

    def run():
        left = messages
        while left and not errors:
            found = end.wait(end.boxes(), PATIENCE)
            if not found:
                errors.append(f"{left} messages of {messages} did not come")
            for box in found:
                answer(end, box, end.take(box).header, 9)
                left -= 1

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def pause(dice):
    """Mostly about as long as a waiter looks before it sleeps."""
    seconds = dice.choice([0.0, dice.uniform(0, 50e-6), dice.uniform(0, 1e-3), dice.uniform(0, 3e-3)])
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        if seconds > 1e-3:
            time.sleep(1e-4)


def asked(front, boxes, seed):
    for box in boxes:
        send(front, box, seed, 3)
    missing = set(boxes)
    while missing:
        found = front.wait(list(missing), PATIENCE)
        assert found, f"{missing} were not answered"
        for box in found:
            assert (front.take(box).x_RH == content(9, 3, LAYOUT.hidden)).all()
            missing.remove(box)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "near",
    [[{0, 1}], [{0}], [set()], [{0, 1}, set()], [{0}, {1}]],
    ids=["one host", "two hosts", "apart", "one each way", "crossed"],
)
def test_nobody_sleeps_through_a_message(opened, near, seed):
    dice = random.Random(seed)
    experts, fronts = opened(2, near)
    nodes = [answering(end, ROUNDS * len(fronts)) for end in experts]
    asking = []
    for a, front in enumerate(fronts):
        own = random.Random(dice.random())

        def ask(a=a, front=front, own=own):
            for turn in range(ROUNDS):
                pause(own)
                asked(front, [Box(a, f, turn % 2) for f in range(2)], turn)

        asking.append(threading.Thread(target=ask))
        asking[-1].start()
    for thread in asking:
        thread.join(2 * PATIENCE)
    for thread, errors in nodes:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive() and not errors


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.long] * (seed >= 20)) for seed in range(6, 60)]
)
def test_nobody_sleeps_through_a_message_in_many_schedules(opened, seed):
    dice = random.Random(seed)
    near = [set(dice.sample(range(2), dice.randint(0, 2))) for _ in range(dice.randint(1, 3))]
    test_nobody_sleeps_through_a_message(opened, near, seed)


def test_strangers_that_knock_only_cost_a_look(opened):
    (end,), (front, _) = opened(1, [{0}, set()])
    over = threading.Event()

    def knock():
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.setblocking(False)
            while not over.is_set():
                try:
                    stranger.sendto(b"?", end._door.socket.getsockname())
                except BlockingIOError:
                    over.wait(1e-4)

    knocking = threading.Thread(target=knock)
    knocking.start()
    try:
        began = time.monotonic()
        assert end.wait(end.boxes(), 0.05) == [] and time.monotonic() - began >= 0.05
        node, errors = answering(end, 20)
        for turn in range(20):
            asked(front, [Box(0, 0, 0)], turn)
        node.join(PATIENCE)
        assert not errors
    finally:
        over.set()
        knocking.join()


@pytest.mark.slow
def test_who_waits_sleeps(opened):
    """Also beside a connection that has ended, which is always ready."""
    (end,), fronts = opened(1, [{0}, set()])
    send(fronts[1], Box(1, 0, 0), 1, 2)
    answer(end, Box(1, 0, 0), arrive(end, Box(1, 0, 0)).header, 3)
    fronts[1].close()
    with pytest.raises(PeerLost, match="attention-1"):
        end.wait([Box(1, 0, 0)], PATIENCE)
    with Calls() as calls:
        assert end.wait([Box(0, 0, 0)], 0.5) == []
    assert (
        calls.made < 10_000
    )  # it looks at most every few hundred microseconds; who never sleeps makes a million


def test_rows_by_memory_do_not_keep_rows_by_tcp_waiting(opened):
    """Though something is always there by memory."""
    (end,), (near, far) = opened(1, [{0}, set()])
    send(far, Box(1, 0, 0), 7, 3)
    came = set()
    for turn in range(100_000):
        send(near, Box(0, 0, 0), turn, 1)
        for box in end.wait(end.boxes(), PATIENCE):
            came.add(box.attention)
            answer(end, box, end.take(box).header, 9)
        if came == {0, 1}:
            return
        arrive(near, Box(0, 0, 0))
    raise AssertionError("it never came")
