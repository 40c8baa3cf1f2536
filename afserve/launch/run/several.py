"""Several models on one machine: names that are told apart, and each one's share of cores and memory. Values only.

Each has what its weights take, and the same part of what all weights leave; cores are shared alike.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from afserve.errors import ConfigError, DoesNotFitError, UserError
from afserve.launch.plan.footprint import gib, usable
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.topology import Topology
from afserve.launch.plan.wishes import UpFlags
from afserve.launch.run.planned_run import PlannedRun, plan_here
from afserve.launch.sites.survey import Survey
from afserve.member import Role


def shared(surveys: Sequence[Survey]) -> list[Survey]:
    """The same, each with its share of the machine. Raises DoesNotFitError where all weights do not fit together."""
    if len(surveys) == 1:
        return list(surveys)
    fewer = [_fewer_cores(survey, len(surveys)) for survey in surveys]
    needed = []
    for number, survey in enumerate(fewer, 1):
        with naming_model(survey.flags, number):
            needed.append(_least(plan_here(survey.flags, survey.found, survey.machine, survey.gpus), survey))
    free = usable(fewer[0].machine)
    if (left := free - sum(needed)) <= 0:
        each = ", ".join(
            f"{survey.found.name} {gib(need)}" for survey, need in zip(surveys, needed, strict=True)
        )
        raise DoesNotFitError(
            f"--models: together they need {gib(sum(needed))} ({each}), this machine has {gib(free)} free; leave one "
            "out, or give --layers, --expert-dtype or --kv-tokens less"
        )
    return [
        replace(survey, machine=_with(survey.machine, need + left // len(surveys)))
        for survey, need in zip(fewer, needed, strict=True)
    ]


@contextmanager
def naming_model(flags: UpFlags, number: int) -> Iterator[None]:
    """Says of which model of --models a refusal is; `number` counts from 1."""
    try:
        yield
    except (UserError, DoesNotFitError) as error:
        if flags.run.models is None:
            raise
        where = f"--models {flags.run.models}: model {number}: "
        raise type(error)(where + error.message, param="models") from error


def check_names(runs: Sequence[PlannedRun]) -> None:
    """Raises ConfigError where a request could mean two of them."""
    seen: dict[str, int] = {}
    for number, run in enumerate(runs, 1):
        for name in run.names:
            if name in seen:
                raise ConfigError(
                    f"--models {run.flags.run.models}: models {seen[name]} and {number} are both called {name!r}; give "
                    "each a name of its own"
                )
            seen[name] = number


def trace_files(runs: Sequence[PlannedRun]) -> list[Path]:
    """Where each model's trace goes, none without --trace: to the file, or beside it under the model's name."""
    path = runs[0].flags.run.trace
    if path is None:
        return []
    if len(runs) == 1:
        return [path]
    return [path.with_name(f"{path.stem}.{quote(run.names[0], safe='')}{path.suffix}") for run in runs]


def _fewer_cores(survey: Survey, models: int) -> Survey:
    gpus = survey.gpus
    parts = replace(gpus, free=tuple(free // models for free in gpus.free))
    return replace(
        survey, machine=replace(survey.machine, cores=max(1, survey.machine.cores // models)), gpus=parts
    )


def _with(machine: Machine, bytes_usable: int) -> Machine:
    """The machine that has so many usable bytes; at most what is there."""
    share = bytes_usable / max(1, usable(machine))
    return replace(machine, memory=min(machine.memory, int(machine.memory * share) + 1))


def _least(topology: Topology, survey: Survey) -> int:
    """Bytes of host memory of all its nodes; of KV caches what the user has fixed."""
    if survey.flags.wishes.engine.device != "cpu":
        return 0
    attention, expert = topology.attention, topology.expert
    kv = attention.kv if survey.flags.wishes.kv_tokens is not None else 0
    nodes = topology.deployment.count(Role.ATTENTION) * (attention.total - attention.kv + kv)
    return nodes + (0 if expert is None else topology.deployment.count(Role.EXPERT) * expert.total)
