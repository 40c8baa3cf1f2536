"""The steps of `bench.gpu_first_run`, in order, and how long each may take when the whole takes 28 minutes."""

import os
from pathlib import Path

from afserve.config_texts import GPU_LIBRARIES
from bench.gpu_runner import Step
from bench.kernels_cuda import GROUPS
from bench.origin import ROOT

TOPOLOGIES = ("colocated", "1x1", "1x2")
WIDE = (("deepseek-v3", 4), ("qwen3-235b-a22b", 4))  # dummy weights of these shapes, so many layers
SANITIZER = "compute-sanitizer"
FILES = (
    "experts", "bits", "linear_fp8", "attention", "eight", "router", "kv", "norm", "quant", "graph", "far",
    "joining", "states", "symm",
)  # fmt: skip


def steps(device: str, wheels: Path, scale: float) -> list[Step]:
    """`scale` stretches every deadline. On a CPU only what needs no GPU."""

    def step(name: str, *command: str, minutes: float, needs: str = "", under: tuple[str, ...] = ()) -> Step:
        return Step(name, command, 60 * minutes * scale, needs, under)

    def module(name: str, *arguments: str) -> tuple[str, ...]:
        return ("-m", f"bench.{name}", *arguments)

    def own(what: str, *arguments: str) -> tuple[str, ...]:
        return module("gpu_steps", what, *arguments, "--device", device)

    on_gpu, cores = device != "cpu", str(os.cpu_count() or 1)
    planned = []
    if wheels.is_dir():
        planned.append(step("wheels", *module("gpu_prepare", "unpack", str(wheels)), minutes=1))
    planned.append(step("about", *own("about"), minutes=1))
    if not list(ROOT.glob("kernels/_native*.so")):
        planned.append(step("native", "setup.py", "build_ext", "--inplace", "-q", minutes=3))
    if on_gpu:
        planned.append(step("compile", *module("gpu_compile", "here", "--jobs", cores), minutes=3))
        planned += [step(f"ops-{name}", *_tests(f"test_{name}.py"), minutes=0.6) for name in FILES]
        checked = (SANITIZER, "--tool", "memcheck", "--error-exitcode", "9")
        planned.append(step("memcheck", *_tests("test_kv.py"), minutes=2, needs=SANITIZER, under=checked))
        planned.append(step("exchange", *module("m2n_cuda", "--json"), minutes=2))
    planned += [step(f"tokens-{name}", *own("tokens", name), minutes=1) for name in TOPOLOGIES]
    if on_gpu:
        planned += [
            step(f"wide-{model}", *own("wide", model, str(layers)), minutes=3) for model, layers in WIDE
        ]
    planned.append(step("sampler", *own("sampler"), minutes=1))
    planned.append(step("copies", *own("copies"), minutes=1))
    if on_gpu:
        planned += [
            step(f"kernels-{group}", *module("kernels_cuda", "--failures", "--only", group), minutes=1.5)
            for group in GROUPS
        ]
        planned += [
            step(f"library-{name}", *module("gpu_libraries", name), minutes=2) for name in GPU_LIBRARIES
        ]
    planned += [step(f"engine-{name}", *own("engine", name), minutes=1.5) for name in TOPOLOGIES]
    return planned


def _tests(name: str) -> tuple[str, ...]:
    """Warnings of another torch or Triton than the pinned ones are no failures of the kernels."""
    path = f"tests/kernels/triton/{name}"
    return ("-m", "pytest", path, "-q", "-m", "not slow", "-o", "filterwarnings=default", "-rf")
