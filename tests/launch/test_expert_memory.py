"""--expert-memory before anything starts: what it makes fit, what is refused, and the way on that names it."""

import re
from dataclasses import replace

import pytest

from afserve.config import EngineSettings, ModelSource
from afserve.errors import ConfigError, DoesNotFitError
from afserve.families.table import load_spec
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import CONFIGS
from afserve.launch.plan.topology import choose
from afserve.launch.plan.ways_on import ways_on
from afserve.launch.plan.wishes import Wishes

GIB = 1 << 30
NANO = load_spec(CONFIGS / "nano")
SOURCE = ModelSource(str(CONFIGS / "nano"), "nano")
HERE = Machine(2, 8 * GIB, 16 * GIB, "")


def large():
    """nano with experts that this machine cannot hold: 24 GiB in bfloat16."""
    kinds = [replace(kind, ffn=replace(kind.moe, inner=8192)) if kind.moe else kind for kind in NANO.kinds]
    return replace(NANO, hidden=4096, kinds=tuple(kinds))


def chosen(memory, spec=NANO, **wishes):
    engine = EngineSettings(expert_memory=memory, device=wishes.pop("device", "cpu"))
    return choose(spec, SOURCE, HERE, Wishes(engine=engine, **wishes))


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


def test_on_a_gpu_it_is_refused():
    with pytest.raises(ConfigError, match="--expert-memory: experts on cuda are all in its memory"):
        chosen("4MiB", device="cuda")


def test_a_model_that_does_not_fit_is_offered_memory_that_works():
    spec = large()
    with pytest.raises(DoesNotFitError):
        chosen("", spec)
    said = ways_on(spec, SOURCE, HERE, Wishes(), "", weights=True)
    offered = re.search(r"afserve up --model nano --expert-memory (\S+) ", said)
    assert offered and chosen(offered[1], spec)
