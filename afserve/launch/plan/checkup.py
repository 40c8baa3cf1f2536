"""Checks what this machine has, what afserve will use of it, and what is missing with the way to get it, for `doctor`.

It changes nothing. Torch is imported here only, and a missing torch is a finding like any other.
"""

import importlib.util
import platform
import resource
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace

from afserve.config import ISAS, ModelSource
from afserve.config_texts import GPU_LIBRARIES
from afserve.families.table import load_spec
from afserve.kernels.isa import isas_here
from afserve.launch.plan.checkup_disk import BAD, NOTE, OK, Finding, deepspeed
from afserve.launch.plan.checkup_numa import numa
from afserve.launch.plan.footprint import gib
from afserve.launch.plan.machine import Machine, this_machine
from afserve.launch.plan.models import CONFIGS
from afserve.launch.plan.numa import seats_here
from afserve.launch.plan.processors import ProcessorModel, cpu_flags
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Wishes
from afserve.member import Role

_ISA = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "asimd", "bf16")


def findings() -> Iterator[Finding]:
    machine = this_machine()
    yield Finding("python", OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield _cores(machine)
    yield _memory(machine)
    yield numa()
    yield from _engine()
    yield _triton()
    yield _open_files()
    yield _model()
    yield _start(machine)


def _cores(machine: Machine) -> Finding:
    flags = cpu_flags()
    isa = [name for name in _ISA if name in flags]
    limited = f", {machine.limited_by}" if machine.limited_by else ""
    return Finding(
        "processor",
        OK,
        f"{machine.cores} usable cores{limited}; {', '.join(isa) or 'no vector extensions known'}",
    )


def _memory(machine: Machine) -> Finding:
    level = OK if machine.memory > 1 << 30 else NOTE
    advice = "" if level == OK else "the bundled model needs about 1 GiB; close something or raise the limit"
    return Finding("memory", level, f"{gib(machine.memory)} free of {gib(machine.memory_total)}", advice)


def _transport() -> Finding:
    from afserve.comm.transports import connect

    kinds = connect.kinds()
    if "shm" in kinds:
        return Finding(
            "data plane", OK, f"{', '.join(kinds)}; shared memory without names, /dev/shm is not used"
        )
    return Finding(
        "data plane", NOTE, ", ".join(kinds), "separate processes need Linux; --colocated works here"
    )


def _kv_transports() -> Finding:
    """What may carry KV blocks: sockets, and the libraries that are here. Absent ones are named in one line."""
    from afserve.comm.kv.carriers.table import CARRIERS, lacking

    why = {name: lacking(name) for name in CARRIERS}
    here = ", ".join(name for name, lack in why.items() if not lack)
    found = "sockets" + (f"; --kv-transport may also be {here}" if here else "")
    absent = "; ".join(f"{name}: {lack}" for name, lack in why.items() if lack)
    return Finding("KV transport", OK, found, absent)


def _engine() -> Iterator[Finding]:
    """What stands on torch."""
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", BAD, str(error), "pip install torch>=2.11 (see the README for CPU wheels)")
        return
    yield Finding("torch", OK, torch.__version__)
    from afserve.kernels.devices import cuda

    names = [cuda.chip_of(torch.device("cuda", number)).name for number in range(cuda.count_gpus())]
    if cuda.built_for_amd():
        yield Finding("GPU", NOTE, "AMD's, which no kernel here is for", "everything runs on the CPU")
    elif names:
        yield Finding("GPU", OK, f"{', '.join(names)}; use it with --device cuda:0")
        yield from libraries("cuda")
    else:
        yield Finding("GPU", NOTE, "none that torch can use", "everything runs on the CPU")
    yield _native()
    yield instructions(isas_here(), ProcessorModel.read())
    yield _transport()
    yield _kv_transports()
    yield deepspeed()


def libraries(device: str) -> Iterator[Finding]:
    """Those that are installed, whose kernels may stand in the place of our own on that device."""
    import torch

    from afserve.kernels.libraries.library import missed

    for name, package in GPU_LIBRARIES.items():
        if importlib.util.find_spec(package) is None:
            continue
        why = missed(name, torch.device(device))
        if why:
            yield Finding(
                name, NOTE, f"installed, and of no use here: {why}", "own kernels compute everything"
            )
        else:
            yield Finding(name, OK, f"with --gpu-kernels {name} what is right of it is used")


def _native() -> Finding:
    from afserve.kernels.ops import open_ops

    explained = open_ops().explain()
    if importlib.util.find_spec("afserve.kernels._native") is not None:
        return Finding("kernels", OK, explained)
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    advice = (
        f"{compiler} is here: reinstall afserve to build the native library"
        if compiler
        else ("install a C++ compiler (apt install g++) and reinstall afserve; it is several times faster")
    )
    return Finding("kernels", NOTE, explained, advice)


def instructions(here: Sequence[str], model: ProcessorModel) -> Finding:
    """What the kernels may use here, best first, and whether something hides what this processor is known to have."""
    if not here:
        return Finding("instructions", NOTE, "PyTorch's own choice", "")
    found = f"{here[0]} is used, the best one"
    if here[1:]:
        found += f"; --isa may also be {', '.join(here[1:])}"
    known = model.best_isa()
    if known and ISAS.index(known) < ISAS.index(here[0]):
        advice = (
            f"processors like this one ({model}) have {known}, which is not shown here: the BIOS, the virtual machine "
            "or the system hides it"
        )
        return Finding("instructions", NOTE, found, advice)
    return Finding("instructions", OK, found)


def _triton() -> Finding:
    use = "fast kernels on a GPU"
    if importlib.util.find_spec("triton") is not None:
        return Finding("triton", OK, f"installed; {use}")
    return Finding("triton", NOTE, "not installed", f"only for {use}: pip install 'afserve[gpu]'")


def _model() -> Finding:
    folder = CONFIGS / "nano"
    if (folder / "model.safetensors").is_file():
        return Finding(
            "bundled model", OK, f"nano, {(folder / 'model.safetensors').stat().st_size / 1e6:.0f} MB"
        )
    return Finding(
        "bundled model", BAD, "nano is not in this installation", "reinstall afserve, or pass --model FOLDER"
    )


def _open_files() -> Finding:
    """Each client connection takes one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    level = OK if soft >= 1024 else NOTE
    return Finding("open files", level, f"{soft} at most", "" if level == OK else "raise it: ulimit -n 4096")


def _start(machine: Machine) -> Finding:
    folder = CONFIGS / "nano"
    spec = load_spec(folder)
    machine = replace(machine, numa=seats_here())
    topology = choose(spec, ModelSource(str(folder), "nano"), machine, Wishes())
    deployment, threads = topology.deployment, topology.deployment.engine.threads
    return Finding(
        "afserve up",
        OK,
        f"{deployment.count(Role.ATTENTION)} attention x {deployment.count(Role.EXPERT)} expert, "
        f"{threads} threads each, {topology.kv_tokens_of_node:,} KV tokens",
    )
