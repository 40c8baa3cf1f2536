"""Two hosts as network namespaces, with a cable that is cut, lossy or slow: nothing fails, and tokens stay the same."""

import asyncio
import signal
import socket
import subprocess
import sys
import time

import pytest

from bench.cable import ADDRESSES, FAIR, Weather, cabled, inside, possible
from bench.faults_networks import CASES, control_port, play, two_hosts
from tests.e2e.streams import begun, texts, wait
from tests.warm.interpreter import WARM

pytestmark = [
    pytest.mark.process,
    pytest.mark.alone,
    pytest.mark.skipif(not possible(), reason="needs Linux, root, ip(8) and /dev/net/tun"),
]
BOTH = (0, 1)


def losses(here):
    """Why, by node."""
    return {each["node"]: each["why"] for each in here.status()["incidents"] if each["what"] == "lost"}


def test_cuts_between_two_hosts(undisturbed, warm_benches, monkeypatch):
    """Of the data plane alone: replicas answer, and nobody is lost. Then of everything: the other host is."""
    monkeypatch.setattr("bench.faults_networks.AFSERVE", WARM.command())
    with two_hosts("--silence", "3") as (here, cable):  # a busy machine says nothing for a second, too
        expected = undisturbed(here.url)
        streams = begun(here.url)
        cable.tell(Weather(cut=BOTH, spared=control_port(here.up)))
        assert texts(streams) == expected
        assert not [why for why in losses(here).values() if "connection" in why]
        cable.tell(FAIR)
        streams = begun(here.url)
        cable.tell(Weather(cut=BOTH))
        assert texts(streams) == expected  # before the loss is waited for: on a busy host that takes longer
        wait(lambda: losses(here).keys() >= {"attention-1", "expert-1"}, "the loss of the other host")


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_spell_of_bad_weather(case):
    with two_hosts() as (here, cable):
        row = asyncio.run(play(case, here, cable))
    assert row["failed"] == row["altered"] == 0, row


def test_namespaces_go_with_a_bench_that_is_told_to_end():
    body = """import time
from bench.cable import cabled
with cabled() as cable: print(*cable.names, flush=True); time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True) as bench:
        names = bench.stdout.readline().split()
        there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(30) == 128 + signal.SIGTERM
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert len(names) == 2
    assert all(name in there and name not in left for name in names)


def test_the_cable_does_as_it_is_told():
    with cabled() as cable:
        with inside(cable.names[0]):
            receiver = socket.socket(type=socket.SOCK_DGRAM)
            receiver.bind((ADDRESSES[0], 0))
        with inside(cable.names[1]):
            sender = socket.socket(type=socket.SOCK_DGRAM)

        def arrived(count, weather, seconds):
            cable.tell(weather)
            receiver.settimeout(seconds)
            for _ in range(count):
                sender.sendto(b"x", receiver.getsockname())
            got = 0
            try:
                while got < count:
                    receiver.recv(1)
                    got += 1
            except TimeoutError:
                return got
            return got

        with receiver, sender:
            assert arrived(50, FAIR, 5.0) == 50
            began = time.monotonic()
            assert arrived(1, Weather(delay=0.2), 5.0) == 1 and time.monotonic() - began >= 0.2
            assert 0 < arrived(50, Weather(loss=0.5), 0.5) < 50
            assert arrived(5, Weather(cut=(1,)), 0.3) == 0
            assert arrived(5, Weather(cut=(0,)), 5.0) == 5
