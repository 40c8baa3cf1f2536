"""Requests that no client should send, to every route of a real server, with greedy streams beside them.

    python -m bench.fuzz [--requests 10000] [--seed 1] [--at-once 24] [--json] [-- FLAGS OF afserve up]
    python -m bench.fuzz --seed 1 --only 4711          one of them again, with its answer

Counts what must not be: a 500, a request without an end, a traceback in the log, a path or a pid of the server in an
answer, and control streams that are altered, cut or refused. Exit status 1 where anything of that was seen.
"""

import argparse
import asyncio
import json
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import urlsplit

from bench.faults_load import Load
from bench.fuzz_requests import Sent, Way, drawn
from bench.served import Served, served

HANG_S = 150.0  # far more than any deadline of the server
CONTROL_TOKENS, CONTROLS_A_SECOND = 24, 1.0
MOST_SHOWN = 20
_STATUS = re.compile(rb"^HTTP/1\.1 (\d{3}) ", re.MULTILINE)
_HIDDEN = re.compile(
    rb"/(?:work|home|tmp|usr|proc|root|run|dev|opt)/[\w.]|\w\.py\b|Traceback|0x[0-9a-f]{8}|File \\?\"|\bpid \d+"
)
_FAILED = re.compile(rb'"type":\s?"(?:internal_error|model_error|api_error)"')
_LOGGED = re.compile(r"Traceback|panicked at|Fatal error|a bug, see below|never retrieved|was never awaited")


@dataclass(slots=True)
class Found:
    """What was seen. `faults` name the request and what was wrong with its answer."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[tuple[int, str]] = field(default_factory=list)
    longest: float = 0.0

    def judge(self, number: int, sent: Sent, answer: bytes, seconds: float) -> None:
        statuses = [int(status) for status in _STATUS.findall(answer)]
        self.statuses.update(status for status in statuses if status != 100)
        self.longest = max(self.longest, seconds)
        if 500 in statuses or _FAILED.search(answer):
            self.faults.append((number, f"failed: {answer[-300:]!r}"))
        shown = next((each for each in _HIDDEN.findall(answer) if each not in sent.raw), None)
        if shown is not None and not all(status < 400 for status in statuses):
            self.faults.append((number, f"shows {shown!r}: {answer[-300:]!r}"))


async def ask(port: int, sent: Sent) -> bytes:
    """The bytes that came. Raises TimeoutError where there is no end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    found = bytearray()
    try:
        async with asyncio.timeout(HANG_S):
            with suppress(OSError):  # the server may close while it is being sent to
                await _send(writer, sent)
                while part := await reader.read(1 << 16):
                    found += part
                    if not sent.waits:
                        break
    finally:
        if sent.way is Way.RESET:
            with suppress(OSError):
                peer: socket.socket = writer.get_extra_info("socket")
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        with suppress(OSError):
            await asyncio.wait_for(writer.wait_closed(), HANG_S)
    return bytes(found)


async def _send(writer: asyncio.StreamWriter, sent: Sent) -> None:
    for start, end in pairwise((0, *sent.cuts, len(sent.raw))):
        writer.write(sent.raw[start:end])
        await writer.drain()
        await asyncio.sleep(0)
    if sent.way is Way.HALF and writer.can_write_eof():
        writer.write_eof()


async def play(here: Served, options: argparse.Namespace) -> tuple[Found, dict[str, object]]:
    """All requests, so many at once, and the control streams beside them."""
    port = urlsplit(here.url).port
    assert port is not None
    found = Found()
    numbers = iter(range(options.requests))
    load = Load(here.url, CONTROLS_A_SECOND, CONTROL_TOKENS)
    expected = await load.reference()
    async with load:
        await asyncio.gather(*(_work(port, options.seed, numbers, found) for _ in range(options.at_once)))
    altered = [a for a in load.answers if not a.error and a.text != expected[a.prompt]]
    failed = [a.error for a in load.answers if a.error]
    gaps = load.gaps(0.0, time.monotonic())
    found.faults += [(-1, f"a control stream was altered: {a.text!r}") for a in altered]
    found.faults += [(-1, f"a control stream failed: {error}") for error in failed]
    return found, {
        "controls": len(load.answers),
        "altered": len(altered),
        "failed": len(failed),
        "longest gap s": round(max(gaps, default=0.0), 2),
    }


async def _work(port: int, seed: int, numbers: Iterator[int], found: Found) -> None:
    for number in numbers:
        sent, began = drawn(seed, number), time.monotonic()
        try:
            answer = await ask(port, sent)
        except TimeoutError:
            found.faults.append((number, f"no end within {HANG_S:.0f} s"))
        except OSError as error:
            found.faults.append((number, f"not connected: {error}"))
        else:
            found.judge(number, sent, answer, time.monotonic() - began)


def logged(text: str) -> list[tuple[int, str]]:
    """A traceback with its last frames and its error: what is indented, and the line behind it."""
    found, lines = [], text.splitlines()
    for at, line in enumerate(lines):
        if _LOGGED.search(line):
            end = next((i for i in range(at + 1, len(lines)) if not lines[i].startswith(" ")), at)
            found.append((-1, "\n    ".join(["the log: " + line, *lines[max(at + 1, end - 6) : end + 1]])))
    return found


def once(here: Served, seed: int, number: int) -> None:
    sent = drawn(seed, number)
    print(sent.way.value, sent.cuts, repr(sent.raw[:4000]), f"({len(sent.raw)} bytes)")
    port = urlsplit(here.url).port
    assert port is not None
    print(asyncio.run(ask(port, sent))[:8000].decode(errors="replace"))
    print(here.printed()[-4000:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--only", type=int, help="send this request alone and show its answer")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("flags", nargs="*", help="of afserve up")
    options = parser.parse_args()
    random.seed(options.seed)
    with served(*(options.flags or ["--attention", "1", "--experts", "2"])) as here:
        if options.only is not None:
            once(here, options.seed, options.only)
            return
        began = time.monotonic()
        found, controls = asyncio.run(play(here, options))
        found.faults += logged(here.printed())
    row = {
        "requests": options.requests,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began),
        "statuses": dict(sorted(found.statuses.items())),
        "longest answer s": round(found.longest, 1),
        **controls,
        "faults": len(found.faults),
    }
    print(json.dumps(row) if options.json else "\n".join(f"{name}: {value}" for name, value in row.items()))
    for number, what in found.faults[:MOST_SHOWN]:
        print(f"fault, request {number}: {what}", file=sys.stderr)
    sys.exit(1 if found.faults else 0)


if __name__ == "__main__":
    main()
