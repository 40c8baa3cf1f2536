"""`python -m bench.gpu_host`: host time of a MoE layer of a decode step where a GPU computes, without one.

Launches are real up to the driver's call, and products up to the memory of their result; neither computes. Tensors are
small and lie in host memory, so what else PyTorch does costs about what dispatching it does. One attention node over
`--experts` expert nodes by the devices' exchange, in one process: the bundled model with `--layers` MoE layers and
dummy weights, eight sequences; an attention node of several `--devices` makes the launches of all. It prints processor
time of the attention node and of one expert node by MoE layer, a layer's share of the step's own work in it, for each
of `--rounds` of ten steps; with `--asked` one whenever a line comes in.

`--beside` is a command that does the same, as this one in another checkout: both are asked in turns, and a row with the
ratios of neighbours is written.
"""

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from afserve.comm.device_exchange.ends import _End
from afserve.config import EngineConfig, ModelSource
from afserve.control.node.beginning import freeze_heap
from afserve.engine.build import spec_of
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.step.spoiled import Spoiled
from afserve.kernels.ops import Ops
from afserve.kernels.triton.backend import TritonBackend
from bench.gpu_chip import AbsentChip
from bench.gpu_compile import H200_MULTIPROCESSORS
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "gpu_host.jsonl"
SEQUENCES, STEPS, SECONDS = 8, 10, 200.0
CPU = torch.device("cpu")
LINE = "attention {:.0f} us, one expert node {:.0f} us of a MoE layer; {:.1f} launches"
TIMES = re.compile(r"attention (\d+).*one expert node (\d+)")


class Stubs:
    """Nothing is computed and no peer is waited for. `count` has how many launches there were."""

    def __init__(self) -> None:
        self.count, self._known = 0, dict[torch.Size, tuple[Tensor, Tensor]]()
        driver.set_active(AbsentChip(90))
        made, route = self._made, TritonBackend.route

        def routed(ops: TritonBackend, x_TH: Tensor, gate_EH: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            return self._chosen(*route(ops, x_TH, gate_EH, *rest), len(gate_EH))

        CompiledKernel._init_handles = lambda kernel: made(kernel)  # noqa: PLW0108 (a function binds as a method)
        TritonBackend.route = routed  # type: ignore[assignment, method-assign]
        _End._arrived = lambda *_: True  # type: ignore[method-assign]
        Spoiled.failures = lambda *_, **__: {}  # type: ignore[method-assign]
        TritonBackend.argmax = lambda _, logits_RV: torch.zeros(len(logits_RV), dtype=torch.int32)  # type: ignore[assignment, method-assign]
        F.linear = lambda x, weight, bias=None: x.new_empty((*x.shape[:-1], weight.shape[0]))  # type: ignore[assignment]
        torch.bmm = lambda a, b, *, out=None: a.new_empty((*a.shape[:2], b.shape[2])) if out is None else out  # type: ignore[assignment]

    def _chosen(self, expert_TK: Tensor, weight_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        """Experts that there are, in the place of what no kernel wrote."""
        key = expert_TK.shape
        if key not in self._known:
            numbers = torch.arange(expert_TK.numel(), dtype=torch.int32).view(key) % experts
            self._known[key] = numbers, torch.ones_like(weight_TK)
        return self._known[key]

    def _made(self, kernel: Any) -> None:
        kernel._run, kernel.module, kernel.function = self._launch, 1, 0

    def _launch(self, *_: object) -> None:
        self.count += 1


def measure(model: Path, experts: int, devices: int) -> Iterator[str]:
    """A line for each round."""
    from tests.cuda.test_launches import Sharing
    from tests.engine.local_cluster import LocalCluster

    torch.set_num_threads(1)
    stubs = Stubs()
    source = ModelSource(str(model), "nano", load_format="dummy")
    config = EngineConfig(
        max_model_len=300, kv_blocks=256, block_size=16, max_batch_tokens=64, micro_batches=1, device_exchange=True,
        tensor_parallel=devices,
    )  # fmt: skip
    ops, layers = Ops(TritonBackend(CPU, H200_MULTIPROCESSORS), CPU, 1), spec_of(source).moe_layers
    cluster = LocalCluster.build(source, config, experts=experts, ops=ops, wrap=Sharing)
    (front,), nodes = cluster.attention, cluster.experts
    for number in range(SEQUENCES):
        params = SamplingParams(max_tokens=279, temperature=0.0, ignore_eos=True)
        front.submit(GenerationRequest(number, tuple(range(3, 13)), params))

    def steps(count: int) -> tuple[float, float]:
        spent, end = [0.0, 0.0], front.stats().steps + count
        while front.stats().steps < end:
            begin = time.process_time()
            front.step()
            middle = time.process_time()
            for node in nodes:
                node.poll()  # it opens the step
                node.poll()
            spent = [spent[0] + middle - begin, spent[1] + time.process_time() - middle]
        return spent[0], spent[1] / experts

    with torch.inference_mode():
        steps(2 * STEPS)
        freeze_heap()  # as a node does
        while True:
            stubs.count = 0
            attention, expert = (1e6 * seconds / STEPS / layers for seconds in steps(STEPS))
            yield LINE.format(attention, expert, stubs.count / STEPS / layers)


def compare(commands: list[list[str]], turns: int) -> list[list[list[int]]]:
    """Of each turn what each command told, [attention, expert] in microseconds."""
    told = []
    with ExitStack() as stack:
        running = [
            stack.enter_context(subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True))
            for command in commands
        ]
        late = threading.Timer(SECONDS, _kill, [running])
        late.start()
        stack.callback(late.cancel)
        for _ in range(turns):
            told.append([_ask(one) for one in running])
        _kill(running)
    return told


def _kill(running: list["subprocess.Popen[str]"]) -> None:
    for one in running:
        one.kill()


def _ask(process: "subprocess.Popen[str]") -> list[int]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    line = process.stdout.readline()
    found = TIMES.search(line)
    assert found is not None, f"no times within {SECONDS:g} s but {line!r}"
    return [int(found[1]), int(found[2])]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_host", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--devices", type=int, default=1, help="of the attention node")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--asked", action="store_true")
    parser.add_argument("--beside", metavar="COMMAND")
    parser.add_argument("--name", default="another checkout", help="what is beside, for the row")
    options = parser.parse_args()
    if options.beside is None:
        config = json.loads((ROOT / "configs" / "nano" / "config.json").read_text(encoding="utf-8"))
        config["num_hidden_layers"] = config["first_k_dense_replace"] + options.layers
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            lines = measure(Path(folder), options.experts, options.devices)
            for _ in sys.stdin if options.asked else range(options.rounds):
                print(next(lines), flush=True)
        return
    sizes = [f"--{name}={getattr(options, name)}" for name in ("experts", "layers", "devices")]
    own = [sys.executable, "-m", "bench.gpu_host", "--asked", *sizes]
    told = compare([shlex.split(options.beside), own], options.rounds)
    row: dict[str, object] = {
        "beside": options.name, "experts": options.experts, "layers": options.layers, "devices": options.devices,
        "turns": len(told),
    }  # fmt: skip
    for side, name in enumerate(("attention", "expert")):
        ratios = sorted(now[side] / beside[side] for beside, now in told)
        row[name] = {
            "us": statistics.median(now[side] for _, now in told),
            "beside_us": statistics.median(beside[side] for beside, _ in told),
            "ratio": round(statistics.median(ratios), 3), "spread": [round(ratios[at], 3) for at in (0, -1)],
        }  # fmt: skip
    row |= origin()
    with OUT.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
