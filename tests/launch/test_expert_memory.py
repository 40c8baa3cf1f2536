"""--expert-memory before anything starts: what it makes fit, what is refused, and the way on that names it."""

import re
from dataclasses import replace

import pytest

from afserve.config import EngineSettings, ModelSource
from afserve.errors import ConfigError, DoesNotFitError
from afserve.families.table import load_spec
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import CONFIGS
from afserve.launch.plan.topology import choose
from afserve.launch.plan.ways_on import ways_on
from afserve.launch.plan.wishes import Share, Wishes

GIB = 1 << 30
NANO = load_spec(CONFIGS / "nano")
SOURCE = ModelSource(str(CONFIGS / "nano"), "nano")
HERE = Machine(2, 8 * GIB, 16 * GIB, "")


def large():
    """nano with experts that this machine cannot hold: 24 GiB in bfloat16."""
    kinds = [replace(kind, ffn=replace(kind.moe, inner=8192)) if kind.moe else kind for kind in NANO.kinds]
    return replace(NANO, hidden=4096, kinds=tuple(kinds))


def chosen(memory, spec=NANO, device="cpu", here=HERE, **wishes):
    flags = {name: wishes.pop(name, False) for name in ("step_graphs", "device_exchange")}
    engine = EngineSettings(expert_memory=memory, device=device, **flags)
    gpus = Gpus(("H200",), (141 << 30,), (141 << 30,)) if device == "cuda" else None
    return choose(spec, SOURCE, here, Wishes(engine=engine, gpus=gpus, **wishes))


@pytest.mark.parametrize("wishes", [{"colocated": True}, {"experts": 1}, {"experts": 2}])
def test_experts_take_no_more_than_it(wishes):
    without, beside = chosen("", **wishes), chosen("4MiB", **wishes)
    of = (lambda made: made.attention) if "colocated" in wishes else (lambda made: made.expert)
    assert of(beside).weights < of(without).weights
    assert of(chosen("4MiB", **wishes)).weights <= without.attention.weights + (4 << 20)
    assert "of each layer at a time" in beside.picked["expert memory"]
    assert beside.deployment.engine.expert_memory == "4MiB"


def test_memory_for_all_says_so():
    assert chosen("1GiB", colocated=True).picked["expert memory"] == "all 32 experts of each layer fit"


def test_too_little_names_what_is_needed():
    with pytest.raises(
        ConfigError, match=r"--expert-memory: .* a token needs \d+ there; give each"
    ) as refused:
        chosen("1MiB", large(), colocated=True)
    least = re.search(r"([\d.]+) GiB or more", refused.value.message)
    assert least and chosen(f"{float(least[1]) + 0.01:.2f}GiB", large(), colocated=True)


@pytest.mark.parametrize("wishes", [{"colocated": True}, {"attention": 1, "experts": 1}])
@pytest.mark.parametrize(
    ("gib", "where"), [(32, "all lie in 24 GiB of the host"), (20, "are read when they are needed")]
)
def test_experts_of_a_gpu_lie_in_the_host_where_it_has_room(gib, where, wishes):
    """Its own memory has the places alone."""
    here = replace(HERE, memory=gib * GIB, memory_total=gib * GIB)
    made = chosen("8GiB", large(), "cuda", here, **wishes)
    assert where in made.picked["expert memory"]
    assert made.deployment.engine.experts_in_host == ("all lie" in where)
    weights = (made.attention if "colocated" in wishes else made.expert).weights
    assert 0 <= weights - (8 << 30) <= 1 << 30


def test_experts_of_gpus_elsewhere_lie_in_their_own_hosts():
    """Whatever this machine has: each host needs room for its nodes' part, and who knows of none is asked."""

    def made(*gib):
        theirs = tuple(Share(0, 1, False, size * GIB, f"host-{n}") for n, size in enumerate(gib))
        own = (Share(1, 0, memory=HERE.memory), *theirs)
        return chosen("8GiB", large(), "cuda", attention=1, experts=2, hosts=own)

    assert "all lie in 13.5 GiB of the host" in made(16, 16).picked["expert memory"]
    assert "are read when they are needed" in made(16, 12).picked["expert memory"]
    with pytest.raises(
        ConfigError, match=r"^--expert-memory: .* nobody says how much host-1 has; write host_memory_gb"
    ):
        made(16, 0)


@pytest.mark.parametrize("name", ["step_graphs", "device_exchange"])
def test_what_needs_no_host_in_a_layer_does_not_go_with_it(name):
    with pytest.raises(
        ConfigError, match=rf"^--{name.replace('_', '-')}: with --expert-memory a host has a part"
    ):
        chosen("4MiB", device="cuda", colocated=True, **{name: True})
    assert chosen("1GiB", device="cuda", colocated=True, **{name: True})


def test_a_model_that_does_not_fit_is_offered_memory_that_works():
    spec = large()
    with pytest.raises(DoesNotFitError):
        chosen("", spec)
    said = ways_on(spec, SOURCE, HERE, Wishes(), "", weights=True)
    offered = re.search(r"afserve up --model nano --expert-memory (\S+) ", said)
    assert offered and chosen(offered[1], spec)
