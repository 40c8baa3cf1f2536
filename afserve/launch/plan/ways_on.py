"""What a user can do where a model does not fit or has no weights here: commands, as they can be typed.

A command with random weights is one that `topology.choose` has found to fit, with memory to spare.
"""

from dataclasses import replace

from afserve.config import EngineSettings, ModelSource
from afserve.errors import ConfigError, DoesNotFitError
from afserve.launch.plan.footprint import GIB, computed_dtype, gib, role_bytes
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Wishes
from afserve.spec import ModelSpec

_OF_THE_FREE = 0.75  # memory that a proposed command may take: reading and packing take more for a moment
_EXPERT_SHARES = (0.5, 0.4, 0.3, 0.2, 0.1)  # of the free memory, for the experts of one node
_PLAIN = "auto"
_POOL = "h20=64"  # an example that holds every known shape


def ways_on(
    spec: ModelSpec, source: ModelSource, machine: Machine, wishes: Wishes, hub: str, *, weights: bool
) -> str:
    """`spec` has all layers. `hub` is the id where a shape's weights are published, if any are.

    `weights`: they are here, but too large.
    """
    name, asked = source.name, wishes.engine.expert_dtype
    few = "int4" if asked == _PLAIN else asked
    rows = [("afserve up", "the bundled nano, the same architecture at a size that fits anywhere")]
    if weights and few != asked and _fits(spec, replace(source, layers=None), machine, few):
        rows.append((f"afserve up --model {name} --expert-dtype {few}", "all of it, here"))
    if weights and (memory := _expert_memory(spec, source, machine, wishes)):
        rows.append(
            (
                f"afserve up --model {name} --expert-memory {memory}",
                "all of it, the rest read from disk as needed",
            )
        )
    rows.append(_random_weights(spec, source, machine, (asked, "int4")))
    if not weights and hub:
        rows.append(
            (f"afserve pull {hub}", "fetch the weights; `up --model` takes the folder that it prints")
        )
    plan = f"afserve plan --model {name} --pool {_POOL}"
    rows.append((plan, "what to buy, how to split it, what it costs"))
    rows.append((f"{plan} --cluster FILE", "the same as a file for `afserve up --cluster FILE`"))
    return "Ways on:\n" + "\n".join(f"  {command}     {what}" for command, what in rows)


def _expert_memory(spec: ModelSpec, source: ModelSource, machine: Machine, wishes: Wishes) -> str:
    """The most that fits beside everything else; empty where nothing does."""
    for share in _EXPERT_SHARES:
        size = f"{int(machine.memory * share * 10 / GIB) / 10}GiB"
        if not size.startswith("0.0") and _fits(spec, source, machine, wishes.engine.expert_dtype, size):
            return size
    return ""


def _random_weights(
    spec: ModelSpec, source: ModelSource, machine: Machine, dtypes: tuple[str, ...]
) -> tuple[str, str]:
    """The most layers that fit, in the dtype that was asked for if any do."""
    least = spec.moe_layer_ids[0] + 1
    for dtype in dict.fromkeys(dtypes):
        cut = _most_layers(spec, source, machine, dtype, least)
        if cut is not None:
            return _command(source.name, cut, dtype), f"random weights; its first {cut} layers fit here"
    cut_bytes = sum(role_bytes(spec.cut(least), source, dtypes[-1]))
    return _command(
        source.name, least, dtypes[-1]
    ), f"on a larger machine: random weights of {gib(cut_bytes)}"


def _command(name: str, layers: int, dtype: str) -> str:
    flag = "" if dtype == _PLAIN else f" --expert-dtype {dtype}"
    return f"afserve up --model {name} --load-format dummy --layers {layers}{flag}"


def _most_layers(
    spec: ModelSpec, source: ModelSource, machine: Machine, dtype: str, least: int
) -> int | None:
    """By halving: more layers never fit where fewer do not."""
    random = replace(source, load_format="dummy", layers=None)
    low, high = least - 1, spec.layers
    while low < high:
        middle = (low + high + 1) // 2
        fits = _fits(spec.cut(middle), random, machine, dtype)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low if low >= least else None


def _fits(
    spec: ModelSpec, source: ModelSource, machine: Machine, dtype: str, expert_memory: str = ""
) -> bool:
    """With one command's defaults, as `_command` gives nothing else."""
    part = replace(machine, memory=int(machine.memory * _OF_THE_FREE))
    if computed_dtype(spec, source) == "float16" and dtype != _PLAIN:
        return False
    try:
        choose(
            spec, source, part, Wishes(engine=EngineSettings(expert_dtype=dtype, expert_memory=expert_memory))
        )
    except (DoesNotFitError, ConfigError):
        return False
    return True
