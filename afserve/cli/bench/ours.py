"""Measures afserve itself: real node processes, requests submitted together, every event timed as it arrives."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afserve.cli.bench.case import Case, prompts
from afserve.cli.bench.figures import Timeline, figures
from afserve.cli.bench.report import BenchRow
from afserve.control.frontend import Frontend
from afserve.doors.llm import LLM
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.kernels.isa import used_isa
from afserve.member import Role

WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """Which nodes. None is picked for the machine. prefill: nodes that only compute prompts, all of them; those of
    `attention` then only decode. share_cores: whether nodes lend their cores. draft: nobody drafts unless asked, since
    answers to random prompts repeat themselves, and a step that makes several tokens of them says nothing of the
    engine."""

    colocated: bool
    attention: int | None = None
    experts: int | None = None
    micro_batches: str = "auto"
    prefill: int = 0
    share_cores: bool | None = None
    draft: str = "off"

    def llm(self, case: Case) -> LLM:
        """Not started."""
        nodes: dict[str, Any] = {"attention": self.attention}
        if self.prefill:
            nodes = {"prefill": self.prefill, "decode": self.attention, "straight_tokens": 0}
        return LLM(
            case.model,
            **nodes,
            experts=None if self.colocated else self.experts,
            share_cores=self.share_cores,
            micro_batches=self.micro_batches,
            colocated=self.colocated,
            threads=case.threads,
            isa=case.isa,
            draft=self.draft,
        )


def _peaks(llm: LLM) -> dict[str, float | None]:
    """MiB of each node's process on this machine, and of this one, which is the gateway."""
    found = {str(node): llm.run.processes.pid_of(node) for node in llm.topology.deployment.nodes}
    return {name: peak_mib(pid) for name, pid in found.items() if pid is not None} | {"gateway": peak_mib()}


def measure(case: Case, shape: Shape) -> Iterator[BenchRow]:
    """One row per batch size, all on one start."""
    llm = shape.llm(case)
    begin = time.perf_counter()
    with llm:
        ready = time.perf_counter() - begin
        run_batch(llm, case, WARM_UP, seed=-1)
        for batch in case.batches:
            runs = [figures(run_batch(llm, case, batch, seed)) for seed in range(case.repeats)]
            deployment, engine = llm.topology.deployment, llm.topology.deployment.engine
            yield BenchRow.of_runs(
                batch,
                runs,
                engine="colocated" if shape.colocated else "afd",
                start_to_ready=ready,
                peak_mib=_peaks(llm),
                nodes=f"{deployment.count(Role.ATTENTION)}x{deployment.count(Role.EXPERT)}",
                micro_batches="auto" if engine.adaptive else str(engine.micro_batches),
                threads=engine.threads,
                isa=used_isa(case.isa),
            )


@dataclass(frozen=True, slots=True)
class Turn:
    """`seconds`: per token of each of `requests` sequences while all of them decode. `gateway`: processor seconds of
    this process, for each token of one."""

    requests: int
    seconds: float
    gateway: float


def in_turns(case: Case, shape: Shape) -> Iterator[Turn]:
    """On one start, all sizes in turn, as often as the case repeats. Nodes are parked while the caller holds on to what
    it was given."""
    with shape.llm(case) as llm:
        run_batch(llm, case, WARM_UP, seed=-1)
        for seed in range(case.repeats):
            for batch in case.batches:
                used = time.process_time()
                found = figures(run_batch(llm, case, batch, seed))
                gateway = (time.process_time() - used) / case.output_len
                rate = found.tokens_per_second
                yield Turn(batch, batch / rate if rate else found.tpot, gateway)


def run_batch(llm: LLM, case: Case, batch: int, seed: int) -> list[Timeline]:
    """All sequences together, each with answers of their full length."""
    params = SamplingParams(max_tokens=case.output_len, temperature=0.0, ignore_eos=True)
    ids = prompts(llm.topology.spec.vocab_size, batch, case.prompt_len, seed)
    requests = [GenerationRequest(i, tuple(prompt), params) for i, prompt in enumerate(ids)]
    return llm.call(_together(llm.run.frontend, requests))


async def _together(frontend: Frontend, requests: Sequence[GenerationRequest]) -> list[Timeline]:
    return list(await asyncio.gather(*(_timed(frontend, request) for request in requests)))


async def _timed(frontend: Frontend, request: GenerationRequest) -> Timeline:
    submitted, times = time.perf_counter(), []
    async with aclosing(frontend.open(request).events()) as events:
        async for event in events:
            times += [time.perf_counter()] * len(event.token_ids)
    return Timeline(submitted, tuple(times))


def peak_mib(pid: int | str = "self") -> float | None:
    """The most resident memory a process ever had."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith("VmHWM:")), "")
    return round(int(line.split()[1]) / 1024, 1) if line else None
