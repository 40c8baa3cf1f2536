"""Steps whose rows devices send by themselves: the same tokens as without nodes, in one process and in several, also
when an expert node is killed, refuses or stops in the middle; then they go on by messages, and heal.

Kernels are interpreted where there is no GPU.
"""

from dataclasses import replace

import pytest
import torch

from afserve.clock import FakeClock
from afserve.comm.m2n.link import ExpertLink
from afserve.config import ModelSource
from afserve.engine.build import colocated, spec_of
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import ConfigError
from afserve.placement.placement import Placement
from tests.comm.begun import FORKED, import_also
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.engine.recording_device import RecordingDevice
from tests.families.tiny import ALL, build
from tests.kernels.triton.exchange_nodes import (
    CPU,
    attention_node,
    exchanging,
    expert_node,
    layout_of,
    run_together,
    serve_expert,
)
from tests.kernels.triton.symm_nodes import CUDA

pytestmark = pytest.mark.skipif(
    CUDA, reason="nodes compute on the CPU here; on a GPU the first run does this"
)
SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
WANTED = requests(prompts((5, 3)), SHORT)


SMALL = {"max_batch_tokens": 8, "prefill_tokens": 8}  # the interpreter takes every row of a mailbox


def settings(**fields):
    return exchanging(config(**SMALL, **fields))


@pytest.fixture(scope="module")
def source(tiny_checkpoint):
    return ModelSource(str(tiny_checkpoint("v3")), "v3")


@pytest.fixture(scope="module")
def alone(source):
    """The tokens of one process without nodes."""
    return collect(drive(colocated(source, config(**SMALL)), WANTED))


def contiguous(source, experts):
    spec = spec_of(source)
    return Placement.contiguous(layers=spec.moe_layers, experts=spec.experts, nodes=experts)


def twice(source):
    """Every expert on both of two nodes."""
    spec = spec_of(source)
    plan = Placement.contiguous(layers=spec.moe_layers, experts=spec.experts, nodes=1)
    layers = [
        layer.__class__((layer.slots[0],) * 2, (tuple(0.5 for _ in layer.slots[0]),) * 2)
        for layer in plan.layers
    ]
    return Placement(plan.epoch, 2, plan.experts, tuple(layers))


class Cluster:
    """In this process."""

    def __init__(self, source, plan, attention=1, made=settings, recorder=None, **how):
        self.source, self.plan, self.config, self.attention = source, plan, made(), attention
        found = [
            expert_node(source, self.config, plan, f, attention, recorder=recorder) for f in range(plan.nodes)
        ]
        self.experts = [node for node, _ in found]
        addresses = [address for _, address in found]
        pairs = [attention_node(source, self.config, plan, a, addresses, **how) for a in range(attention)]
        self.fronts, self.links = [node for node, _ in pairs], [link for _, link in pairs]

    def run(self, wanted=WANTED, between=lambda steps: None):
        return run_together(self.fronts, self.experts, wanted, between)

    def close(self):
        for link in self.links:
            link.close()
        for expert in self.experts:
            expert.close()


@pytest.fixture
def cluster(source):
    made = []

    def make(*args, source=source, **how):
        made.append(Cluster(source, *args, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("attention", "experts", "devices"), [pytest.param(1, 1, 1, marks=pytest.mark.long), (2, 3, 2)]
)
def test_the_same_tokens_as_alone(cluster, source, alone, attention, experts, devices):
    made = settings(micro_batches=2, tensor_parallel=devices)
    nodes = cluster(contiguous(source, experts), attention, lambda: made)
    assert nodes.run() == alone
    layers = layout_of(source, nodes.config, nodes.plan).exchange
    for link in nodes.links:
        assert link.exchanged_steps > 3 and not link.failed_steps
    steps = sum(link.exchanged_steps for link in nodes.links)
    assert [node._port.exchanged for node in nodes.experts] == [steps * layers] * experts


def test_a_prepared_step_goes_over_the_same_exchange(cluster, source, alone):
    """As one whose launches are recorded: where they go is the same from step to step."""
    nodes, ways = cluster(contiguous(source, 2)), []
    (link,), (runner,) = nodes.links, [one._runner for one in nodes.fronts[0]._micro_batches]
    run_step = runner.run_step

    def prepared(step):
        ways.append(link.prepare(runner.index))
        return run_step(step)

    runner.run_step = prepared
    assert nodes.run() == alone
    assert link.exchanged_steps == len(ways) > 3 and not link.failed_steps
    assert ways[0] is not None and all(way is ways[0] for way in ways)


@pytest.mark.parametrize("refuses", ["", "a kernel that waits for the host"])
def test_an_expert_nodes_steps_are_recorded_and_launched_as_one(cluster, tmp_path, monkeypatch, refuses):
    """A model with experts in one layer: in host memory nobody may launch a layer before its rows are there."""
    family, fields = ALL["dots1"]
    monkeypatch.setitem(ALL, "dots1-one", (family, fields | {"first_k_dense_replace": 2}))
    source, device = (
        ModelSource(str(build("dots1-one", tmp_path)), "dots1-one"),
        RecordingDevice(CPU, refuses),
    )
    nodes = cluster(contiguous(source, 2), source=source, recorder=device)
    assert nodes.run() == collect(drive(colocated(source, config(**SMALL)), WANTED))
    (link,) = nodes.links
    assert link.exchanged_steps > 3 and not link.failed_steps
    assert [node._port.exchanged for node in nodes.experts] == [link.exchanged_steps] * 2
    recorded = 0 if refuses else 2
    assert (device.recorded, device.replayed) == (recorded, recorded * (link.exchanged_steps - 1))


@pytest.mark.long
def test_a_killed_node_whose_experts_stand_elsewhere_costs_one_step_and_no_token(cluster, source, alone):
    """And one in its place is exchanged with again."""
    nodes = cluster(twice(source))
    (link,) = nodes.links

    def between(steps):
        if link.exchanged_steps == 2 and len(nodes.experts) == 2:
            nodes.experts.pop().close()

    assert nodes.run(between=between) == alone
    assert link.failed_steps == 1 and link.present == {0}
    before = link.exchanged_steps
    node, address = expert_node(source, nodes.config, nodes.plan, 1, 1)
    nodes.experts.append(node)
    link.attach(link.dial(1, address, 10.0))
    assert nodes.run() == alone
    assert link.exchanged_steps > before + 2 and link.failed_steps == 1 and node._port.exchanged > 0


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) for name in ("qwen3-next", "granite4-odd")]
    + ["kimi-linear-odd"],
)
def test_states_that_moved_on_in_a_step_that_failed_are_computed_again(cluster, tmp_path, name):
    """Behind the last whole block, since what a layer keeps of it is no longer that of the token before. Of gated delta
    nets, Mamba2 and KDA."""
    source = ModelSource(str(build(name, tmp_path)), name)
    nodes = cluster(twice(source), source=source)
    (front,), (link,) = nodes.fronts, nodes.links

    def between(steps):
        if link.exchanged_steps == 3 and len(nodes.experts) == 2:
            nodes.experts.pop().close()

    wanted = requests(prompts((5, 3)), replace(SHORT, max_tokens=8))
    assert nodes.run(wanted, between) == collect(drive(colocated(source, config(**SMALL)), wanted))
    assert link.exchanged_steps > 3 and link.failed_steps == 1 and front.stats().preemptions == 2


def test_a_node_that_does_not_answer_is_given_up_in_time_and_its_experts_are_named(cluster, source):
    """As one that is stopped: its connection stays."""
    clock = FakeClock()
    nodes = cluster(contiguous(source, 2), deadline=3.0, clock=clock)
    nodes.run(WANTED[:1])
    silent = nodes.experts.pop()
    (front,), (link,) = nodes.fronts, nodes.links
    front.submit(WANTED[1])
    events, owing = [], {}
    while front.busy:
        events += front.step()
        nodes.experts[0].poll()
        front.wait(0.001)
        owing |= link.owing()
        clock.advance(0.05)
    assert "expert-1 did not answer for expert" in events[-1].error and link.failed_steps == 1
    assert owing[1] > 2.5
    silent.close()


def test_epochs_go_on_as_with_messages(cluster, source, alone):
    """Both nodes accept the next one before it is adopted; a node that does not know it refuses, and is lost."""
    nodes = cluster(twice(source))
    (link,), following = nodes.links, nodes.plan.with_epoch(nodes.plan.epoch + 1)

    def between(steps):
        if link.exchanged_steps == 1 and link.epoch != following.epoch:
            for expert in nodes.experts:
                expert.accept(following.epoch)
            nodes.fronts[0].adopt(following)
        if link.exchanged_steps == 2:
            nodes.experts[1].retire(following.epoch)

    assert nodes.run(between=between) == alone
    assert link.epoch == following.epoch and link.failed_steps == 1 and link.present == {0}


def test_prompts_in_pieces_of_which_no_row_is_read(cluster, source):
    """The last layer's rows are not sent then: both ends go on with the next step."""
    long = requests(prompts((19,)), SHORT)
    told = collect(drive(colocated(source, config(**SMALL)), long))
    nodes = cluster(contiguous(source, 2))
    assert nodes.run(long) == told and not nodes.links[0].failed_steps


def test_a_node_that_exchanges_nothing_is_refused_at_the_door(source):
    plan = contiguous(source, 1)
    node, address = expert_node(source, config(**SMALL), plan, 0, 1)
    with pytest.raises(Exception, match="do not agree: exchange is 0 there and"):
        attention_node(source, settings(), plan, 0, [address])
    node.close()


def test_other_transports_say_so(source):
    from afserve.comm.device_exchange.wire import open_link
    from afserve.comm.transports import connect

    layout = layout_of(source, settings(), contiguous(source, 1))
    end, address = connect.listen("local", expert=0, attention_nodes=1, layout=layout)
    front = connect.connect([address], attention=0, layout=layout, timeout=1.0)
    with pytest.raises(
        ConfigError, match="device_exchange: nodes share no memory of devices over this transport"
    ):
        open_link(front, attention=0, layout=layout, placement=contiguous(source, 1))
    front.close()
    end.close()


def test_without_it_rows_go_by_messages(cluster, source):
    nodes = cluster(contiguous(source, 1), 1, lambda: config(**SMALL))
    assert type(nodes.links[0]) is ExpertLink


@pytest.mark.process
@pytest.mark.parametrize(
    ("attention", "experts", "killed"),
    [pytest.param(2, experts, False, marks=pytest.mark.long) for experts in (2, 3)] + [(1, 2, True)],
)
def test_processes(source, alone, attention, experts, killed):
    """Nobody but flags says when rows are there."""
    plan = twice(source) if killed else contiguous(source, experts)
    import_also("tests.kernels.triton.exchange_nodes")
    pipes, processes = [], []
    for index in range(experts):
        mine, theirs = FORKED.Pipe()
        arguments = source, settings(), plan, index, attention, theirs
        processes.append(FORKED.Process(target=serve_expert, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(mine)
    try:
        assert all(pipe.poll(120) for pipe in pipes)
        addresses = [pipe.recv() for pipe in pipes]
        pairs = [attention_node(source, settings(), plan, a, addresses) for a in range(attention)]
        links = [link for _, link in pairs]

        def between(steps):
            if killed and links[0].exchanged_steps == 2 and processes[-1].is_alive():
                processes[-1].kill()

        with torch.inference_mode():
            assert run_together([node for node, _ in pairs], [], WANTED, between) == alone
        assert sum(link.failed_steps for link in links) == killed
        for pipe in pipes[: 1 if killed else None]:
            pipe.send("stop")
            assert pipe.poll(30) and pipe.recv() > 0
        for link in links:
            link.close()
    finally:
        for process in processes:
            process.kill()
            process.join()
