"""`python -m bench.m2n_cuda`: dispatch and combine between GPUs, as kernels alone, against the device's copy bandwidth.

128 rows x 7168, top-8, 8 experts per node, FP8 or bf16 out and bf16 back, one attention node and one to eight expert
nodes. With a GPU for each node they are processes of their own; with fewer, all are on one GPU, each in a stream: then
every byte crosses that GPU's memory instead of NVLink. A round is a graph replay at all ends, without any computing,
after the L2 cache was overwritten. Without a CUDA device it prints "not measured" and writes nothing.
"""

import argparse
import json
import multiprocessing
import socket
import statistics
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from afserve.comm.peer_memory.cuda_driver import CudaDriver
from afserve.comm.peer_memory.ipc_domain import IpcDomain, Shared
from afserve.comm.transport import Kind, Layout, WireType
from afserve.kernels.devices.opened import device_of
from bench.origin import ROOT, origin

ROWS, HIDDEN, TOP_K, PER_NODE = 128, 7168, 8, 8
SPAWN = multiprocessing.get_context("spawn")
WIRES = {"fp8": WireType.FLOAT8, "bf16": WireType.BFLOAT16}
LONGEST = 120.0
PATIENCE_NS = 30_000_000_000


def layout_of(wire: str) -> Layout:
    return Layout(HIDDEN, TOP_K, ROWS, 1, 1, PER_NODE, WIRES[wire], WireType.BFLOAT16)


def share(connection: socket.socket, layout: Layout, device: torch.device) -> Shared:
    """The memory of the attention node and an expert node, which hand it to each other there."""
    from afserve.comm.device_exchange.region import Region

    size = max(Region.of(kind, layout).size for kind in (Kind.DISPATCH, Kind.COMBINE))
    return IpcDomain(CudaDriver(device)).share(connection, size, LONGEST)


def expert(node: int, connection: socket.socket, wire: str, rounds: int, pipe: Connection) -> None:
    from afserve.comm.device_exchange.ends import Boxes, Patience, SymmExpert

    device = torch.device("cuda", node + 1)
    torch.cuda.set_device(device)
    layout = layout_of(wire)
    shared = share(connection, layout, device)
    boxes = Boxes.at([shared.mine_B.data_ptr()], [shared.theirs_B.data_ptr()], device, shared)
    end = SymmExpert(layout, [boxes], Patience(PATIENCE_NS))
    y_NH = torch.ones(ROWS, HIDDEN, dtype=torch.bfloat16, device=device)

    def turn() -> None:
        end.answer(end.receive(0), y_NH)

    turn()
    device_of(device).finish()
    replay = device_of(device).record_launch(turn)
    pipe.send("captured")
    for _ in range(rounds):
        replay()
    end.check()
    pipe.recv()


def attention(
    connections: list[socket.socket], wire: str, rounds: int, pipes: list[Connection]
) -> dict[str, object]:
    from afserve.comm.device_exchange.ends import Boxes, Patience, SymmAttention
    from bench.cuda_clock import Clock

    device = torch.device("cuda", 0)
    layout = layout_of(wire)
    nodes, shared = len(connections), [share(connection, layout, device) for connection in connections]
    mine = [one.mine_B.data_ptr() for one in shared]
    theirs = [one.theirs_B.data_ptr() for one in shared]
    end = SymmAttention(layout, [Boxes.at(mine, theirs, device, shared)], Patience(PATIENCE_NS))
    x_TH, slot_TK, weight_TK, stamp = inputs(nodes, device)

    def turn() -> None:
        end.combine(end.dispatch(x_TH, slot_TK, weight_TK, stamp, 0))

    turn()
    end.check()
    replay = device_of(device).record_launch(turn)
    for pipe in pipes:
        assert pipe.poll(LONGEST) and pipe.recv() == "captured"
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    queue, marks = device_of(device).current(), []
    for _ in range(rounds):
        flush.zero_()
        begin = queue.put_event(timed=True)
        replay()
        marks.append((begin, queue.put_event(timed=True)))
    end.check()
    seconds = sorted(finish.seconds_since(begin) for begin, finish in marks[rounds // 10 :])
    for pipe in pipes:
        pipe.send("bye")
    copy = copy_bandwidth(Clock(device, 30))
    return row(wire, nodes, rows_sent(slot_TK, nodes), seconds, copy)


def on_one_gpu(wire: str, nodes: int, rounds: int) -> dict[str, object]:
    """All ends in this process, expert nodes beside each other."""
    from bench.cuda_clock import Clock

    device = torch.device("cuda", 0)
    clock = Clock(device, rounds)
    turn, sent = one_process(wire, nodes, device)
    return row(wire, nodes, sent, clock.seconds(turn), copy_bandwidth(clock))


def one_process(wire: str, nodes: int, device: torch.device) -> tuple[Callable[[], torch.Tensor], int]:
    """A round trip of all ends, whose result is the sums, and how many rows it sends; in turns without a GPU."""
    from afserve.comm.device_exchange.ends import Boxes, Patience, SymmAttention, SymmExpert
    from afserve.comm.device_exchange.region import Region

    is_gpu = device.type == "cuda"
    layout, patience = layout_of(wire), Patience(PATIENCE_NS if is_gpu else 1, is_gpu)
    size = max(Region.of(kind, layout).size for kind in (Kind.DISPATCH, Kind.COMBINE))
    memory = torch.zeros((2, nodes, size), dtype=torch.uint8, device=device)
    at = [[memory[side, node].data_ptr() for node in range(nodes)] for side in range(2)]
    front = SymmAttention(layout, [Boxes.at(at[1], at[0], device, memory)], patience)
    backs = [
        SymmExpert(layout, [Boxes.at([at[0][node]], [at[1][node]], device, memory)], patience)
        for node in range(nodes)
    ]
    x_TH, slot_TK, weight_TK, stamp = inputs(nodes, device)
    y_NH = torch.ones(ROWS, HIDDEN, dtype=torch.bfloat16, device=device)
    place = device_of(device)
    queues = [place.queue() for _ in range(nodes)]

    def turn() -> torch.Tensor:
        here = place.current()
        ticket = front.dispatch(x_TH, slot_TK, weight_TK, stamp, 0)
        for back, queue in zip(backs, queues):
            with queue.inside():
                back.answer(back.receive(0), y_NH)
        for queue in queues:
            with queue.inside(), here.inside():
                pass  # what follows here waits for what is in the queue
        return front.combine(ticket)

    turn()
    for end in (front, *backs):
        end.check()
    return turn, rows_sent(slot_TK, nodes)


def inputs(nodes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, distinct slots of all nodes for each, weights, and a stamp."""
    torch.manual_seed(0)
    x_TH = torch.randn(ROWS, HIDDEN, device=device, dtype=torch.bfloat16)
    slot_TK = torch.rand(ROWS, nodes * PER_NODE, device=device).topk(TOP_K).indices.int().contiguous()
    weight_TK = torch.rand(ROWS, TOP_K, device=device)
    return x_TH, slot_TK, weight_TK, torch.zeros(2, dtype=torch.int32, device=device)


def rows_sent(slot_TK: torch.Tensor, nodes: int) -> int:
    """A row counts once for each node that it goes to."""
    node_N = torch.arange(nodes, device=slot_TK.device)
    return int((slot_TK // PER_NODE)[:, :, None].eq(node_N).any(1).sum())


def copy_bandwidth(clock: object) -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = clock.seconds(lambda: target.copy_(source))  # type: ignore[attr-defined]
    return float(2 * source.numel() / statistics.median(times))


def row(wire: str, nodes: int, sent: int, seconds: list[float], copy: float) -> dict[str, object]:
    """`of_copy` is the time to read and write every byte once at the device's copy bandwidth, over the median."""
    out = sent * (
        HIDDEN * (1 if wire == "fp8" else 2) + (4 * HIDDEN // 128 if wire == "fp8" else 0) + 8 * TOP_K
    )
    back = sent * HIDDEN * 2
    median = statistics.median(seconds)
    return {
        "transport": "symm", "wire": wire, "nodes": nodes, "rows": ROWS, "rows_sent": sent, "bytes": out + back,
        "one_gpu": torch.cuda.device_count() <= nodes,
        "us_p50": 1e6 * median, "us_p99": 1e6 * seconds[int(0.99 * len(seconds))], "rounds": len(seconds),
        "gb_s": (out + back) / median / 1e9, "copy_gb_s": copy / 1e9, "of_copy": 2 * (out + back) / copy / median,
        "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__,
    }  # fmt: skip


def measure(wire: str, nodes: int, rounds: int) -> dict[str, object]:
    pipes, processes, connections = [], [], []
    for node in range(nodes):
        (mine, theirs), (here, there) = SPAWN.Pipe(), socket.socketpair()
        process = SPAWN.Process(target=expert, args=(node, there, wire, rounds, theirs), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)
        connections.append(here)
    try:
        return attention(connections, wire, rounds, pipes)
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()
            process.join()


def cases(nodes: list[int], wires: list[str], rounds: int) -> Iterator[dict[str, object]]:
    for wire in wires:
        for count in nodes:
            enough = torch.cuda.device_count() > count
            yield (measure if enough else on_one_gpu)(wire, count, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.m2n_cuda", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default="1,2,4,8", help="expert nodes, comma-separated")
    parser.add_argument("--wires", default=",".join(WIRES), help="of rows on their way out")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="one object a line instead of a table")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "m2n_cuda.jsonl")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("not measured: no CUDA device")
        return
    torch.cuda.set_device(0)
    known = origin()
    for found in cases([int(n) for n in options.nodes.split(",")], options.wires.split(","), options.rounds):
        print(json.dumps(found) if options.json else line(found), flush=True)
        with options.out.open("a") as out:
            out.write(json.dumps(found | known) + "\n")


def line(found: dict[str, object]) -> str:
    shared = ", all on one GPU" if found["one_gpu"] else ""
    return (
        f"{found['wire']} 1x{found['nodes']}: {found['us_p50']:.1f} us p50, {found['us_p99']:.1f} us p99, "
        f"{found['gb_s']:.1f} GB/s, {found['of_copy']:.0%} of a copy{shared}"
    )


if __name__ == "__main__":
    main()
