"""`python -m bench.keys`: what the gate costs one request: without keys, with one of many, with limits.

The application behind it answers at once and there are no sockets, so the figure is the gate's alone: microseconds of
this process's CPU time per request, the thread that SQLite runs in included.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from starlette.types import Message, Receive, Scope, Send

from afserve.server.access.accounts import Accounts
from afserve.server.access.key_file import KeyLimits, KeyRole, add_key
from afserve.server.access.keyring import Keyring
from afserve.server.gate import Gate
from afserve.server.http.connections import Connections
from afserve.server.http.settings import ServerSettings
from afserve.server.metrics.observe import HttpMetrics
from afserve.server.metrics.spans import Spans
from afserve.server.state.database import Database
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "keys.jsonl"
WAYS = ("no keys", "a key", "limits in memory", "limits on disk")
LIMITS = KeyLimits(requests_per_minute=1 << 30, tokens_per_minute=1 << 30, concurrent=1 << 20)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def measure(way: str, file: Path, secret: str, folder: str, requests: int) -> float:
    """Microseconds of CPU time per request."""
    database = Database(folder if way == "limits on disk" else "")
    accounts = Accounts(Keyring(path="" if way == "no keys" else str(file)), database)
    gate = Gate(application, ServerSettings(), HttpMetrics(), Connections(16, 16), accounts, Spans())
    headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {secret}".encode())]

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None:
        assert message.get("status", 200) == 200, message

    async def one() -> None:
        scope: Scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        await gate(scope, receive, send)

    await one()
    began = time.process_time()
    for _ in range(requests):
        await one()
    spent = time.process_time() - began
    await accounts.stop_telling()
    await database.close_file()
    return spent / requests * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keys", type=int, default=1000, help="in the file")
    parser.add_argument("--record", action="store_true", help=f"append rows to {OUT.relative_to(ROOT)}")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        plain, limited = (
            add_key(file, n, KeyRole.USER, of) for n, of in (("plain", KeyLimits()), ("limited", LIMITS))
        )
        with file.open("a") as more:
            more.writelines(f'\n["k{i}"]\nsha256 = "{i:064x}"\n' for i in range(asked.keys - 2))
        for way in WAYS:
            secret = limited if way.startswith("limits") else plain
            took = [
                asyncio.run(measure(way, file, secret, folder, asked.requests)) for _ in range(asked.rounds)
            ]
            row = {
                "way": way,
                "keys": asked.keys,
                "cpu_us_per_request": round(statistics.median(took), 1),
                "spread": [round(min(took), 1), round(max(took), 1)],
                **origin(),
            }
            print(json.dumps(row))
            if asked.record:
                with OUT.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
