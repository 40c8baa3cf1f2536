"""Several models on one machine: together they fit, or one line says what each needs."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.config import ModelSource
from afserve.errors import DoesNotFitError
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import CONFIGS, FoundModel
from afserve.launch.plan.wishes import RunSettings, UpFlags, Wishes
from afserve.launch.run.planned_run import PlannedRun, plan_here
from afserve.launch.run.several import shared, trace_files
from afserve.launch.sites.survey import Survey
from afserve.member import Role
from afserve.server.http.settings import Listening, ServerSettings

GIB = 1 << 30
NANO = FoundModel("nano", CONFIGS / "nano", CONFIGS / "nano", weights=True)


def site(machine, **wishes):
    flags = UpFlags(RunSettings(), ModelSource("", "nano"), Wishes(**wishes), Listening(), ServerSettings())
    return Survey(flags, NANO, machine, Gpus())


def planned(one):
    return plan_here(one.flags, one.found, one.machine, one.gpus)


def bytes_of(topology):
    deployment = topology.deployment
    experts = deployment.count(Role.EXPERT) * topology.expert.total if topology.expert else 0
    return deployment.count(Role.ATTENTION) * topology.attention.total + experts


WISHES = st.fixed_dictionaries(
    {},
    optional={
        "attention": st.integers(1, 3),
        "kv_tokens": st.sampled_from([512, 4096, 65536]),
        "colocated": st.just(True),
    },
)


@pytest.mark.slow
@given(st.integers(1, 16), st.floats(0.5, 64), st.lists(WISHES, min_size=2, max_size=4))
@settings(max_examples=20, deadline=None)
def test_they_fit_together_or_are_refused(cores, memory, wishes):
    machine = Machine(cores, int(memory * GIB), int(memory * GIB))
    try:
        topologies = [planned(each) for each in shared([site(machine, **wish) for wish in wishes])]
    except DoesNotFitError as error:
        assert error.exit_code == 2
        return
    assert sum(map(bytes_of, topologies)) <= machine.memory
    for wish, topology in zip(wishes, topologies, strict=True):
        assert topology.kv_tokens_of_node >= min(wish.get("kv_tokens", 512), 512)


def test_one_alone_has_all_of_it():
    alone = site(Machine(8, 16 * GIB, 16 * GIB))
    assert shared([alone]) == [alone]


def test_what_is_too_much_together_is_one_line():
    machine = Machine(4, int(2.2 * GIB), 4 * GIB)
    with pytest.raises(
        DoesNotFitError, match=r"together they need .*nano .*nano .* free; leave one out"
    ) as found:
        shared([site(machine, attention=3, colocated=True)] * 4)
    assert "\n" not in found.value.message


def test_each_model_has_a_trace_of_its_own():
    one = site(Machine(8, 16 * GIB, 16 * GIB))
    topology = planned(one)

    def runs(trace, *names):
        flags = replace(one.flags, run=RunSettings(trace=trace))
        return [PlannedRun(flags, NANO, (name,), topology, None, None, None) for name in names]

    assert trace_files(runs(None, "a", "b")) == []
    assert trace_files(runs(Path("x/run.json"), "a")) == [Path("x/run.json")]
    files = trace_files(runs(Path("x/run.json"), "a", "o/a", "o%2Fa", ".."))
    assert files[:2] == [Path("x/run.a.json"), Path("x/run.o%2Fa.json")]
    assert len(set(files)) == 4 and {file.parent for file in files} == {Path("x")}
