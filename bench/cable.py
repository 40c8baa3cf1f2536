"""Two network namespaces as hosts, and the cable between them: it delays, loses and cuts packets as it is told.

    python -m bench.cable NAME NAME        carries packets; `with cabled(...)` starts it and tells it

The cable is a TUN device in each namespace and one process between them, since few kernels have netem. It knows packets
and nothing of what they carry. Needs Linux, root, ip(8) and /dev/net/tun.
"""

import argparse
import ctypes
import fcntl
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from bench.origin import ROOT

ADDRESSES = ("10.213.11.1", "10.213.11.2")
DEVICE = "cable0"
TUN = Path("/dev/net/tun")
QUEUED = 2000  # packets that a device keeps for a reader that is late
_NETWORK = 0x40000000  # CLONE_NEWNET
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LARGEST = 65536


@dataclass(frozen=True, slots=True)
class Weather:
    """What happens to packets: seconds that each takes, the share that is lost, and ways that are cut.

    `cut` names the senders (0 or 1) of whom nothing arrives any more, but for TCP packets from or to the port `spared`.
    """

    delay: float = 0.0
    loss: float = 0.0
    cut: tuple[int, ...] = ()
    spared: int = 0


FAIR = Weather()


class Cable:
    """`tell` is in force when it returns."""

    def __init__(self, names: tuple[str, str], process: "subprocess.Popen[str]") -> None:
        self.names = names
        self._process = process

    def tell(self, weather: Weather) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(weather)) + "\n")
        self._process.stdin.flush()
        self._heard()

    def _heard(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"the cable between {' and '.join(self.names)} has ended")


def possible() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") is not None and TUN.exists()


@contextmanager
def cabled() -> Iterator[Cable]:
    """Two namespaces with one address of ADDRESSES each, which reach each other and nobody else. They go at the end,
    and where this process is told to end by SIGTERM."""
    names = f"afsc{os.getpid() % 100000}x", f"afsc{os.getpid() % 100000}y"
    with _ended_well(), _hosts(names) as cable:
        yield cable


@contextmanager
def _hosts(names: tuple[str, str]) -> Iterator[Cable]:
    try:
        for name in names:
            _ip("netns", "add", name)
        command = [sys.executable, "-m", "bench.cable", *names]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:  # a signal to all that a terminal runs leaves it there for the end
            try:
                cable = Cable(names, process)
                cable.tell(FAIR)
                for name, address in zip(names, ADDRESSES):
                    _ip("-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
                    _ip("-n", name, "link", "set", DEVICE, "txqueuelen", str(QUEUED), "up")
                    _ip("-n", name, "link", "set", "lo", "up")
                yield cable
            finally:
                process.kill()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def _ended_well() -> Iterator[None]:
    """SIGTERM ends this thread as an exception does, so that whatever it has begun is taken back. Another one does not
    interrupt that. Only a main thread hears signals."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """This thread, and whatever it starts meanwhile, is in a namespace."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(name)
        yield
    finally:
        _set(before, "the namespace it came from")
        os.close(before)


def enter(name: str) -> None:
    """Move this thread into a namespace. Raises OSError where there is none."""
    handle = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    _set(handle, name)
    os.close(handle)


def _set(handle: int, name: str) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(handle, _NETWORK):
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


# ---- the process between the two


def _device() -> int:
    """A TUN device of this thread's namespace; it is gone when the number is closed."""
    number = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(number, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return number


def ports(packet: bytes) -> tuple[int, ...]:
    """From and to which ports an IPv4 packet of TCP goes; nothing for others."""
    head = 4 * (packet[0] & 15)
    if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP or len(packet) < head + 4:
        return ()
    return struct.unpack_from(">HH", packet, head)


class Carrier:
    """Moves packets between two devices. A packet that a device does not take is lost, as on a real one."""

    def __init__(self, devices: tuple[int, int], seed: int) -> None:
        self._devices = devices
        self._random = random.Random(seed)
        self._weather = FAIR
        self._under_way: tuple[deque[tuple[float, bytes]], deque[tuple[float, bytes]]] = deque(), deque()

    def run(self) -> None:
        """Until standard input ends."""
        poll = select.poll()
        for number in (*self._devices, sys.stdin.fileno()):
            poll.register(number, select.POLLIN)
        while True:
            for number, _ in poll.poll(self._patience()):
                if number == sys.stdin.fileno():
                    line = sys.stdin.readline()
                    if not line:
                        return
                    self._obey(line)
                else:
                    self._take(self._devices.index(number))
            self._deliver()

    def _obey(self, line: str) -> None:
        told = json.loads(line)
        self._weather = Weather(told["delay"], told["loss"], tuple(told["cut"]), told["spared"])
        print("heard", flush=True)

    def _patience(self) -> float | None:
        """Milliseconds until a packet is due; None while there is none."""
        due = min((queue[0][0] for queue in self._under_way if queue), default=None)
        return None if due is None else max(0.0, 1e3 * (due - time.monotonic()))

    def _take(self, sender: int) -> None:
        weather = self._weather
        while True:
            try:
                packet = os.read(self._devices[sender], _LARGEST)
            except BlockingIOError:
                return
            cut = sender in weather.cut and not (weather.spared and weather.spared in ports(packet))
            if not cut and self._random.random() >= weather.loss:
                self._under_way[sender].append((time.monotonic() + weather.delay, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        for sender, queue in enumerate(self._under_way):
            while queue and queue[0][0] <= now:
                _, packet = queue.popleft()
                try:
                    os.write(self._devices[1 - sender], packet)
                except OSError:
                    continue  # no room, or not up yet: lost


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cable", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs=2, help="the namespaces")
    parser.add_argument("--seed", type=int, default=1, help="of what is lost")
    options = parser.parse_args()
    devices = []
    for name in options.names:
        with inside(name):
            devices.append(_device())
    Carrier((devices[0], devices[1]), options.seed).run()


if __name__ == "__main__":
    main()
