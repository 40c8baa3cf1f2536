"""`python -m bench.gateway`: what one gateway process passes on, with the attention side scripted.

Three processes. The gateway is the real one: HTTP, requests, gRPC streams of attention nodes. The attention nodes are
scripted: every step they send one token of each open request, as an attention node does, as fast as the gateway takes
them or with pauses, in which others use the caches (`--step-seconds`). The client opens the streams over real sockets
and counts what it reads. The figure is tokens per second of the gateway's own CPU time, so that it does not depend on
the cores that the other two take.
"""

import argparse
import asyncio
import gc
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import grpc.aio
import psutil

from afserve.control.backend import ServedModel
from afserve.control.frontend import Frontend
from afserve.control.gateway import Gateway
from afserve.control.node.gateways import FromGateway, GatewayStreams
from afserve.control.wire import channel
from afserve.control.wire.change_values import Change, Changed
from afserve.control.wire.request_values import (
    Attend,
    Cancel,
    Submit,
    Tokens,
)
from afserve.control.wire.values import (
    AttentionNodes,
    AttentionPeer,
    Gateways,
)
from afserve.control.wire.view_values import ClusterView
from afserve.engine.scheduling.request import TokenEvent
from afserve.launch.plan.models import CONFIGS
from afserve.member import attention_life
from afserve.server.app import build_app
from afserve.server.http.settings import ServerSettings
from afserve.server.serve import bind, serve
from afserve.tokens.tokenizer import Tokenizer
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "gateway.jsonl"
TOKEN = "a-token"
NANO = str(CONFIGS / "nano")


class _Cluster:
    """Always ready; asked nothing else."""

    ready = True

    def check(self) -> None:
        return

    async def view(self) -> ClusterView:
        return ClusterView(0, ())

    async def placement(self) -> str:
        raise NotImplementedError

    async def apply_placement(self, text: str) -> None:
        raise NotImplementedError

    async def record_routing(self, on: bool) -> bytes:
        raise NotImplementedError

    async def recorded_routing(self) -> bytes:
        raise NotImplementedError

    async def change(self, change: Change) -> Changed:
        raise NotImplementedError

    async def recordings(self) -> tuple[bytes, ...]:
        raise NotImplementedError


async def gateway_part(nodes: int) -> None:
    """Prints its two ports, serves until its parent closes its standard input."""
    gateway = Gateway(TOKEN)
    gateway.update_nodes(
        AttentionNodes(
            tuple(AttentionPeer(attention_life(index, 0), accepting=True) for index in range(nodes))
        )
    )
    server = grpc.aio.server(options=channel.options(receive="from_node"))
    server.add_generic_rpc_handlers((gateway.handler,))
    inside = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    frontend = Frontend(_Cluster(), gateway, ServedModel("nano", NANO, 1 << 20, 2048, 0))
    sock = bind("127.0.0.1", 0)
    app = build_app([(frontend, Tokenizer.from_folder(NANO))], ServerSettings())
    print(json.dumps([inside, sock.getsockname()[1]]), flush=True)
    gc.freeze()  # as `afserve up` does
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(app, sock, stop))
    await asyncio.to_thread(sys.stdin.read)
    stop.set()
    await serving
    await server.stop(0.1)


def node_part(index: int, port: int, step_seconds: float) -> None:
    """A scripted attention node: a token for each open request per step, at most so often."""
    changed, arrived = threading.Condition(), []

    def deliver(value: FromGateway) -> None:
        with changed:
            arrived.append(value.value)
            changed.notify()

    streams = GatewayStreams(
        lambda gateway: Attend(attention_life(index, 0)), f"127.0.0.1:{port}", TOKEN, deliver
    )
    streams.update(Gateways(((0, ""),)))
    streams.redial()
    left: dict[int, int] = {}
    while True:
        with changed:
            if not arrived and not left:
                changed.wait(0.5)
            commands, arrived[:] = list(arrived), []
        for command in commands:
            match command:
                case Submit(request):
                    left[request.handle] = request.params.max_tokens
                case Cancel(number):
                    left.pop(number, None)
                case None:
                    return
        if left:
            events = []
            for number in list(left):
                left[number] -= 1
                events.append(TokenEvent(number, (300,), None if left[number] else "length"))
                if not left[number]:
                    del left[number]
            streams.send(0, Tokens(tuple(events)))
            time.sleep(step_seconds)


async def load(port: int, streams: int, tokens: int) -> int:
    """Opens them at once; returns the pieces read. Raises when one is not answered whole."""
    body = json.dumps({"prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    ).encode()

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        pieces, last = 0, b""
        while data := await reader.read(1 << 16):
            pieces += data.count(b"data: {")
            last = (last + data)[-64:]
        writer.close()
        if b"[DONE]" not in last:
            raise RuntimeError(f"a stream ended after {pieces} pieces: {last!r}")
        return pieces

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


def measured(streams: int, tokens: int, nodes: int, step_seconds: float) -> dict[str, float]:
    """One run in processes of its own."""
    part = [sys.executable, "-m", "bench.gateway", "--part"]
    with tempfile.TemporaryFile() as log:
        gateway = subprocess.Popen(
            [*part, "gateway", "--nodes", str(nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert gateway.stdout is not None and gateway.stdin is not None
        inside, port = json.loads(gateway.stdout.readline())
        command = [*part, "node", "--port", str(inside), "--step-seconds", str(step_seconds), "--index"]
        others = [subprocess.Popen([*command, str(index)], stderr=log) for index in range(nodes)]
        try:
            _wait_ready(port)
            process = psutil.Process(gateway.pid)
            asyncio.run(load(port, min(streams, 32), 16))  # everything has run once
            before, began = sum(process.cpu_times()[:2]), time.perf_counter()
            asyncio.run(load(port, streams, tokens))
            wall, cpu = time.perf_counter() - began, sum(process.cpu_times()[:2]) - before
            resident = process.memory_info().rss
        finally:
            gateway.stdin.close()
            for child in (*others, gateway):
                with suppress(subprocess.TimeoutExpired):
                    child.wait(5)
                child.kill()
                child.wait()
    total = streams * tokens
    return {
        "tokens_per_core_second": total / cpu,
        "tokens_per_second": total / wall,
        "cpu": cpu,
        "mib": resident / 2**20,
    }


def _wait_ready(port: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as sock:
            sock.sendall(
                f"GET /ready HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode()
            )
            if b" 200 " in sock.recv(64):
                return
        time.sleep(0.05)
    raise RuntimeError("the gateway was not ready within 60 s")


def main() -> None:
    options = _parser().parse_args()
    if options.part == "gateway":
        asyncio.run(gateway_part(options.nodes))
    elif options.part == "node":
        node_part(options.index, options.port, options.step_seconds)
    else:
        _rows(options)


def _rows(options: argparse.Namespace) -> None:
    print(f"{'streams':>8} {'nodes':>6} {'tokens/s per core':>24} {'per token':>10} {'MiB':>6}")
    for streams in options.streams:
        tokens = max(options.tokens, 20_000 // streams)  # CPU time is counted in hundredths of a second
        runs = [
            measured(streams, tokens, options.nodes, options.step_seconds) for _ in range(options.repeats)
        ]
        rates = sorted(run["tokens_per_core_second"] for run in runs)
        row = {
            "bench": "gateway",
            "streams": streams,
            "tokens": tokens,
            "attention_nodes": options.nodes,
            "step_seconds": options.step_seconds,
            "tokens_per_core_second": round(statistics.median(rates)),
            "low": round(rates[0]),
            "high": round(rates[-1]),
            "tokens_per_second": round(statistics.median(run["tokens_per_second"] for run in runs)),
            "mib": round(statistics.median(run["mib"] for run in runs)),
        }
        spread = f"{row['tokens_per_core_second']:,} ({row['low']:,} to {row['high']:,})"
        each = f"{1e6 / row['tokens_per_core_second']:.1f} us"
        print(f"{streams:>8} {options.nodes:>6} {spread:>24} {each:>10} {row['mib']:>6}")
        if options.save:
            with Path(options.save).open("a") as file:
                file.write(json.dumps({**row, **origin()}) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gateway", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each stream, at least")
    parser.add_argument("--nodes", type=int, default=2, help="scripted attention nodes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    parser.add_argument(
        "--step-seconds",
        type=float,
        default=0.0,
        help="between two steps of a node; 0 is as fast as they are read",
    )
    for hidden in ("--part", "--index", "--port"):
        parser.add_argument(hidden, type=str if hidden == "--part" else int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
