"""`python -m bench.gpu_host`: host time of a MoE layer of a decode step where a GPU computes, without one.

Launches are real up to the driver's call, and products up to the memory of their result; neither computes. Tensors are
small and lie in host memory, so what else PyTorch does costs about what dispatching it does. One attention node over
`--experts` expert nodes by the devices' exchange, in one process: the bundled model with `--layers` MoE layers and
dummy weights, eight sequences. It prints processor time of the attention node and of one expert node by MoE layer, a
layer's share of the step's own work in it: medians over `--rounds` of ten steps.

`--beside` is a command that prints the same line, as this one in another checkout: both run in turns, and a row with
the ratios is written.
"""

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from afserve.comm.device_exchange.ends import _End
from afserve.config import EngineConfig, ModelSource
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


def measure(model: Path, experts: int, rounds: int) -> str:
    from tests.cuda.test_launches import Sharing
    from tests.engine.local_cluster import LocalCluster

    torch.set_num_threads(1)
    stubs = Stubs()
    source = ModelSource(str(model), "nano", load_format="dummy")
    config = EngineConfig(
        max_model_len=300, kv_blocks=256, block_size=16, max_batch_tokens=64, micro_batches=1, device_exchange=True
    )  # fmt: skip
    ops, layers = Ops(TritonBackend(CPU, H200_MULTIPROCESSORS), CPU, 1), spec_of(source).moe_layers
    cluster = LocalCluster.build(source, config, experts=experts, ops=ops, wrap=Sharing)
    (front,), nodes = cluster.attention, cluster.experts
    for number in range(SEQUENCES):
        params = SamplingParams(max_tokens=250, temperature=0.0, ignore_eos=True)
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
        steps(STEPS)
        stubs.count = 0
        found = [steps(STEPS) for _ in range(rounds)]
    attention, expert = (1e6 * statistics.median(side) / STEPS / layers for side in zip(*found, strict=True))
    return LINE.format(attention, expert, stubs.count / rounds / STEPS / layers)


def _times(command: list[str]) -> list[int]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    found = TIMES.search(done.stdout)
    assert found is not None, f"it printed no times: {done.stdout[-300:]}"
    return [int(found[1]), int(found[2])]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_host", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", metavar="COMMAND")
    parser.add_argument("--turns", type=int, default=3, help="with --beside")
    options = parser.parse_args()
    if options.beside is None:
        config = json.loads((ROOT / "configs" / "nano" / "config.json").read_text(encoding="utf-8"))
        config["num_hidden_layers"] = config["first_k_dense_replace"] + options.layers
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            print(measure(Path(folder), options.experts, options.rounds))
        return
    sizes = [f"--{name}={getattr(options, name)}" for name in ("experts", "layers", "rounds")]
    turns = []
    for _ in range(options.turns):
        beside = _times(shlex.split(options.beside))
        now = _times([sys.executable, "-m", "bench.gpu_host", *sizes])
        turns.append({"us": now, "beside_us": beside})
        print(json.dumps(turns[-1]), flush=True)
    ratios = [[turn["us"][side] / turn["beside_us"][side] for turn in turns] for side in range(2)]
    row = {
        "experts": options.experts, "layers": options.layers, "turns": turns,
        "attention_ratio": round(statistics.median(ratios[0]), 3),
        "expert_ratio": round(statistics.median(ratios[1]), 3),
    } | origin()  # fmt: skip
    with OUT.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(row["attention_ratio"], row["expert_ratio"])


if __name__ == "__main__":
    main()
