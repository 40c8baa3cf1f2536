"""`python -m bench.members`: one controller with thousands of scripted nodes.

Two processes. The controller is the real one, with its gRPC streams, membership, migration and balancing; the other
process plays all nodes, one stream each: they register, are ready, send heartbeats and routing counts as often as real
nodes do, and answer fills and adoptions at once. One expert node is cut off.

Figures: seconds from the last node's registration to ready; the controller's CPU seconds per second while nothing
happens; seconds from the cut until every attention node has been told of it, and until all have the placement without
that node. The shape is DeepSeek-V3's: 58 layers of 256 experts, two slots of each node and layer.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import grpc.aio
import numpy as np
import psutil

from afserve import __version__
from afserve.clock import AwakeClock
from afserve.config import EngineConfig, ModelSource
from afserve.control.controller import Controller
from afserve.control.controller_wiring import Wiring
from afserve.control.membership.balancing import BalanceRules
from afserve.control.membership.recovery import OnLoss, Rules
from afserve.control.node.heartbeat import heartbeat_seconds
from afserve.control.node.report import routed_seconds
from afserve.control.wire import channel, messages
from afserve.control.wire.desired import SILENCE_SECONDS, Deployment, shortest_silence
from afserve.control.wire.placement_values import Adopt, Adopted, Filled, FillSlots, Routed
from afserve.control.wire.placements import SaidLast
from afserve.control.wire.values import (
    Assigned,
    Endpoint,
    FromNode,
    Heartbeat,
    Peers,
    Ready,
    Register,
    ToNode,
)
from afserve.engine.stats import AttentionStats, ExpertStats
from afserve.member import NodeId, Role
from afserve.placement.placement import LayerPlacement, Placement
from afserve.placement.rebalance.stats import RoutedRows
from bench.origin import ROOT, origin

Say = Callable[[FromNode], Awaitable[None]]
OUT = ROOT / "bench" / "results" / "members.jsonl"
TOKEN = "a-token"
LAYERS, EXPERTS, SLOTS, SPARE = 58, 256, 2, 1
READY_S, TOLD_S = 300.0, 60.0
REDIAL_S = 0.5


def placement(nodes: int) -> Placement:
    """Every expert in turn, on as many nodes as there are, with room for one more per node and layer."""
    each = max(SLOTS, -(-EXPERTS // nodes))
    slots = np.arange(nodes * each).reshape(nodes, each)
    layers = []
    for layer in range(LAYERS):
        expert_NS = (slots + layer) % EXPERTS
        copies_E = np.bincount(expert_NS.ravel(), minlength=EXPERTS)
        share_NS = 1.0 / copies_E[expert_NS]
        layers.append(
            LayerPlacement(
                tuple((*map(int, row), *[-1] * SPARE) for row in expert_NS),
                tuple((*map(float, row), *[0.0] * SPARE) for row in share_NS),
            )
        )
    return Placement(epoch=0, nodes=nodes, experts=EXPERTS, layers=tuple(layers))


# ---- the controller's process


async def controller_part(attention: int, experts: int, silence: float) -> None:
    """Prints its address, then one line for each thing that happens; ends when its standard input does."""
    silence = max(silence, shortest_silence(attention + experts))  # as `up` does
    deployment = Deployment(
        source=ModelSource("/nowhere", "deepseek-v3"),
        engine=EngineConfig(max_model_len=4096, kv_blocks=1024),
        counts={Role.ATTENTION: attention, Role.EXPERT: experts},
        fingerprint="scripted",
        placement=placement(experts),
        most_attention=attention,
        silence=silence,
    )
    controller = Controller(
        deployment,
        TOKEN,
        AwakeClock(),
        BalanceRules(),
        Rules(on_loss=OnLoss.RECOVER, silence=silence, register=READY_S, stall=READY_S, patience=60.0),
        Wiring(tell_failure=lambda error: print(json.dumps({"failed": str(error)}), flush=True)),
    )
    address = await controller.start()
    print(json.dumps({"address": address}), flush=True)
    ready = asyncio.create_task(controller.wait_ready())
    ready.add_done_callback(lambda _: print(json.dumps({"ready": time.monotonic()}), flush=True))
    await asyncio.to_thread(sys.stdin.read)
    await controller.stop()


# ---- the nodes' process


class _Nodes:
    """All scripted nodes, on one event loop. What is the same for many is decoded once."""

    def __init__(self, address: str, attention: int, experts: int) -> None:
        self.address = address
        self.attention, self.experts = attention, experts
        self.silence = SILENCE_SECONDS
        self.registered_at = 0.0
        self.told_at: dict[NodeId, float] = {}  # attention nodes: when the last Peers came
        self.peers: dict[NodeId, int] = {}  # how many expert nodes an attention node knows
        self.adopted_at: dict[NodeId, float] = {}
        self.bytes = 0
        self._decoded: dict[bytes, ToNode] = {}
        self._calls: dict[NodeId, asyncio.Task[None]] = {}

    def start(self, role: Role, count: int) -> None:
        for index in range(count):
            node = NodeId(role, index)
            self._calls[node] = asyncio.create_task(self._live(node))

    def cut(self, node: NodeId) -> None:
        self._calls.pop(node).cancel()

    async def stop(self) -> None:
        for task in self._calls.values():
            task.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)

    def since(self, begin: float, at: dict[NodeId, float]) -> float | None:
        """Seconds from `begin` to when the last attention node that is there was told; None while one was not."""
        there = [
            at.get(node, 0.0)
            for node, task in self._calls.items()
            if node.role is Role.ATTENTION and not task.done()
        ]
        return None if min(there) < begin else max(there) - begin

    def lost(self) -> int:
        """Nodes that the controller has sent away, for being late."""
        return sum(task.done() for task in self._calls.values())

    def decode(self, data: bytes, last: SaidLast) -> ToNode:
        """What has no placement, and is the same for many, is decoded once."""
        self.bytes += len(data)
        found = self._decoded.get(data)
        if found is None:
            found = messages.decode_to_node(data, last)
            if isinstance(found, Peers):
                self._decoded = {data: found}
        return found

    async def _live(self, node: NodeId) -> None:
        """Whose stream ends before it was admitted comes again: thousands dial in the same moment, from one process."""
        while not await self._lived(node):
            await asyncio.sleep(REDIAL_S)

    async def _lived(self, node: NodeId) -> bool:
        """False where it was not admitted."""
        options = [*channel.options(receive="to_node"), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self.address, options=options) as wire:
            call = wire.stream_stream(channel.METHOD)(
                metadata=(("authorization", f"Bearer {TOKEN}"),), wait_for_ready=True
            )

            writing = asyncio.Lock()  # one at a time, as a real node's one writer

            async def say(value: FromNode) -> None:
                async with writing:
                    await call.write(messages.encode_from_node(value))

            beat: asyncio.Task[None] | None = None
            last, admitted = SaidLast(), False
            try:
                await say(Register(node.role, node.index, 1000 + node.index, f"host-{node}", __version__))
                while (data := await call.read()) is not grpc.aio.EOF:
                    match self.decode(data, last):
                        case Assigned(deployment=deployment):
                            admitted = True
                            self.registered_at, self.silence = time.monotonic(), deployment.silence
                            mailbox = f"shm:{node}" if node.role is Role.EXPERT else ""
                            await say(Endpoint(mailbox, {"hidden_size": "7168"}))
                            await say(Ready(1 << 30))
                            beat = asyncio.create_task(self._beat(node, say))
                        case Peers(experts):
                            self.peers[node], self.told_at[node] = len(experts), time.monotonic()
                        case FillSlots(there):
                            await say(Filled(there.epoch))
                        case Adopt(there):
                            self.adopted_at[node] = time.monotonic()
                            await say(Adopted(there.epoch))
            except grpc.aio.AioRpcError:
                if admitted:
                    raise
            finally:
                if beat is not None:
                    beat.cancel()
        return admitted

    async def _beat(self, node: NodeId, say: Say) -> None:
        """Heartbeats, and routing counts of attention nodes, as often as real nodes send them."""
        random = np.random.default_rng(node.index)
        counts_LE = random.integers(0, 64, (LAYERS, EXPERTS))
        every = heartbeat_seconds(self.silence, self.attention + self.experts)
        routed = routed_seconds(every, self.attention)
        await asyncio.sleep(float(random.random()) * every)
        steps, last = 0, time.monotonic() - float(random.random()) * routed
        while True:
            steps += 40
            if node.role is Role.EXPERT:
                await say(Heartbeat(1 << 30, ExpertStats(messages=steps, rows=steps * 64)))
            else:
                await say(Heartbeat(1 << 30, AttentionStats(running=64, steps=steps, generated_tokens=steps)))
                if time.monotonic() - last >= routed:
                    last = time.monotonic()
                    await say(Routed(RoutedRows(np.zeros_like(counts_LE), counts_LE)))
            await asyncio.sleep(every)


async def nodes_part(address: str, attention: int, experts: int) -> None:
    """Each line of its standard input is a question; the answer is one line of JSON."""
    nodes = _Nodes(address, attention, experts)
    nodes.start(Role.ATTENTION, attention)
    nodes.start(Role.EXPERT, experts)
    lost = NodeId(Role.EXPERT, experts - 1)
    cut_at = 0.0
    while line := await asyncio.to_thread(sys.stdin.readline):
        match line.strip():
            case "cut":
                cut_at = time.monotonic()
                nodes.cut(lost)
                answer: object = cut_at
            case "told":
                answer = nodes.since(cut_at, nodes.told_at)
            case "moved":
                answer = nodes.since(cut_at, nodes.adopted_at)
            case _:
                answer = {"registered_at": nodes.registered_at, "bytes": nodes.bytes, "lost": nodes.lost()}
        print(json.dumps(answer), flush=True)
    await nodes.stop()


# ---- the one that asks


class _Part:
    """One of the two processes, asked by lines."""

    def __init__(self, *arguments: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "bench.members", "--part", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> object:
        assert self.child.stdout is not None
        text = self.child.stdout.readline()
        if not text:
            raise RuntimeError(f"a process of the benchmark ended with {self.child.wait()}")
        return json.loads(text)

    def ask(self, what: str) -> object:
        assert self.child.stdin is not None
        self.child.stdin.write(what + "\n")
        self.child.stdin.flush()
        return self.line()

    def until(self, what: str, seconds: float) -> float:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if isinstance(answer := self.ask(what), float):
                return answer
            time.sleep(0.1)  # to ask costs the scripted nodes time; they note when they were told
        raise RuntimeError(f"{what}: not within {seconds:.0f} s")

    def close(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(20)
        self.child.kill()
        self.child.wait()


def measured(attention: int, experts: int, seconds: float, silence: float) -> dict[str, float]:
    """One run. `seconds` of steady state."""
    counts = ("--attention", str(attention), "--experts", str(experts), "--silence", str(silence))
    controller = _Part("controller", *counts)
    nodes = None
    try:
        address = _field(controller.line(), "address")
        nodes = _Part("nodes", "--address", str(address), *counts)
        ready_at = float(str(_field(controller.line(), "ready")))
        report = nodes.ask("report")
        process = psutil.Process(controller.child.pid)
        start_cpu = _cpu(process)
        time.sleep(3.0)  # everybody has begun to speak
        before, began = _cpu(process), time.perf_counter()
        time.sleep(seconds)
        steady = (_cpu(process) - before) / (time.perf_counter() - began)
        own, scripted = _cpu(process), _cpu(psutil.Process(nodes.child.pid))
        nodes.ask("cut")
        told = nodes.until("told", TOLD_S)
        moved = nodes.until("moved", TOLD_S)
        own, scripted = _cpu(process) - own, _cpu(psutil.Process(nodes.child.pid)) - scripted
        return {
            "ready_s": ready_at - float(str(_field(report, "registered_at"))),
            "start_cpu_s": start_cpu,
            "cores": steady,
            "told_s": told,
            "moved_s": moved,
            "loss_cpu_s": own,
            "scripted_cpu_s": scripted,
            "mib": process.memory_info().rss / 2**20,
            "sent_mib": float(str(_field(report, "bytes"))) / 2**20,
            "lost": float(str(_field(nodes.ask("report"), "lost"))),
        }
    finally:
        for part in (nodes, controller):
            if part is not None:
                part.close()


def _cpu(process: psutil.Process) -> float:
    """Seconds that it has computed."""
    return float(sum(process.cpu_times()[:2]))


def _field(answer: object, name: str) -> object:
    if not isinstance(answer, dict) or name not in answer:
        raise RuntimeError(f"expected {name}, got {answer}")
    return answer[name]


def main() -> None:
    options = _parser().parse_args()
    if options.part == "controller":
        asyncio.run(controller_part(options.attention, options.experts, options.silence))
    elif options.part == "nodes":
        asyncio.run(nodes_part(options.address, options.attention, options.experts))
    else:
        _rows(options)


def _rows(options: argparse.Namespace) -> None:
    runs = [
        measured(options.attention, options.experts, options.seconds, options.silence)
        for _ in range(options.repeats)
    ]
    medians = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
    row = {"bench": "members", "attention": options.attention, "experts": options.experts, **medians}
    print(json.dumps(row))
    if options.save:
        with Path(options.save).open("a") as file:
            file.write(json.dumps({**row, **origin()}) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.members", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--attention", type=int, default=1000)
    parser.add_argument("--experts", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of steady state")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    parser.add_argument("--silence", type=float, default=SILENCE_SECONDS, help="seconds, as of `up`")
    for hidden in ("--part", "--address"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
