"""Steps of separate nodes as one native call each: an attention node that sends and waits by itself, and expert nodes
that answer without Python. Tokens are those of the same nodes layer by layer, also where a wait is given up."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from afserve.comm.m2n import exchanges
from afserve.comm.m2n.link import ExpertLink
from afserve.comm.m2n.port import ExpertPort
from afserve.comm.transports import connect
from afserve.config import ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, colocated, layout_for, spec_of
from afserve.engine.expert_node import ExpertNode
from afserve.kernels.ops import Ops
from afserve.placement.placement import Placement
from afserve.tracing.trace import AWAY, Trace
from tests.engine.driving import collect, config, drive, prompts, requests

pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
NAMES = ("dsa", "v3", "v2-groups", "qwen3", "mixtral-window", "qwen3-next", "gemma4")


class World:
    """One attention node and expert nodes over shared memory; each expert node has a thread while `serving`."""

    def __init__(self, source, settings, experts=1):
        spec = spec_of(source, settings.drafts())
        self.spec, self.settings = spec, settings
        self.plan = Placement.contiguous(layers=spec.moe_layers, experts=spec.experts, nodes=experts)
        slots = self.plan.slots_per_node()
        layout = layout_for(source, spec, settings, slots)
        self.experts, addresses = [], []
        for index in range(experts):
            end, address = connect.listen("shm", expert=index, attention_nodes=1, layout=layout)
            held, draft = self.plan.held(index), settings.drafts()
            bank = build_expert_bank(source, held, slots, expert_dtype=settings.expert_dtype, draft=draft)
            self.experts.append(ExpertNode(ExpertPort(end), bank, epoch=self.plan.epoch))
            addresses.append(address)
        end = connect.connect(addresses, attention=0, layout=layout, timeout=10.0)
        self.link = ExpertLink(end, attention=0, layout=layout, placement=self.plan)
        self.node = build_attention_node(source, settings, self.link)
        self.over = False

    def _serve(self, node):
        while not self.over:
            if not node.poll():
                node.wait(0.02)

    @contextmanager
    def serving(self):
        threads = [threading.Thread(target=self._serve, args=(node,)) for node in self.experts]
        for thread in threads:
            thread.start()
        try:
            yield self.node
        finally:
            self.over = True
            for thread in threads:
                thread.join(30.0)

    def close(self):
        self.link.close()
        for node in self.experts:
            node.close()


def run(node, asked):
    for request in asked:
        node.submit(request)
    events = []
    while node.busy:
        events += node.step()
        if node.stalled:
            node.wait(0.02)
        node.check()
    return collect(events)


@pytest.fixture
def world():
    made = []

    def make(source, settings, experts=1):
        made.append(World(source, settings, experts))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def calls(monkeypatch):
    """Of every step that was one call over an exchange, whether it was stopped."""
    stopped, run_stack = [], Ops.run_stack

    def noted(ops, stack, x_TH, batch, bad_T, exchange):
        done = run_stack(ops, stack, x_TH, batch, bad_T, exchange)
        if exchange is not None:
            stopped.append(done.stopped is not None)
        return done

    monkeypatch.setattr(Ops, "run_stack", noted)
    return stopped


@pytest.mark.slow
@pytest.mark.by_day(2)
@pytest.mark.parametrize("experts", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_in_one_call_give_the_colocated_tokens(name, dtype, experts, folder_of, world, calls):
    source = ModelSource(str(folder_of(name)), name, dtype=dtype)
    made, asked = world(source, config(), experts), requests(prompts())
    with made.serving() as node:
        tokens = run(node, asked)
    assert tokens == collect(drive(colocated(source, config()), asked))
    assert len(calls) > 32, "few steps were one call"
    stats, layers = node.stats(), made.spec.moe_layers
    assert stats.dispatches % layers == 0 and stats.under_way_seconds > 0
    assert stats.parked_seconds > 0 and stats.busy_seconds > 0
    messages = sum(each.stats().messages for each in made.experts)
    assert layers * (stats.steps - 1) <= messages <= stats.dispatches * experts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "experts"), [("v3", 1), ("v3", 2), ("dsa", 2), ("qwen3-next", 1), ("gemma4", 2)]
)
def test_a_layer_whose_sums_are_late_goes_on_in_python(name, experts, folder_of, world, calls, monkeypatch):
    """Where shared and routed experts are added together, the shared one is computed once more."""
    monkeypatch.setattr(exchanges, "_PATIENCE", 0.0)
    source = ModelSource(str(folder_of(name)), name, dtype="bfloat16")
    made, asked = world(source, config(), experts), requests(prompts())
    with made.serving() as node:
        tokens = run(node, asked)
    assert calls and all(calls), "somebody waited"
    assert tokens == collect(drive(colocated(source, config()), asked))
    assert node.stats().dispatches % made.spec.moe_layers == 0


def test_expert_nodes_answer_at_once_and_count_what_they_did(tiny_checkpoint, world):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3", dtype="bfloat16")
    made, found = world(source, config()), []
    port = made.experts[0]._port
    answer = port.answer

    def noted(*asked):
        found.append(answer(*asked))
        return found[-1]

    port.answer = noted
    with made.serving() as node:
        run(node, requests(prompts()))
    here = [one for one in found if one is not None]
    assert sum(one.messages for one in here) > 32
    stats = made.experts[0].stats()
    assert stats.messages == stats.calls == node.stats().dispatches, "a message was not counted, or twice"
    assert stats.rows >= sum(one.rows for one in here) > 0 < stats.busy_seconds


@pytest.mark.slow
def test_a_trace_and_another_busy_micro_batch_go_layer_by_layer(tiny_checkpoint, world, calls):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    asked = requests(prompts())
    wanted = collect(drive(colocated(source, config()), asked))
    made = world(source, config())
    made.node.trace = Trace("attention-0")
    with made.serving() as node:
        assert run(node, asked) == wanted
    drawn = sum(row.endswith(AWAY) for row, *_ in made.node.trace.slices)
    assert not calls and drawn == node.stats().dispatches
    with world(source, config(micro_batches=2)).serving() as node:
        assert run(node, asked) == wanted
        both = len(calls)
        assert run(node, asked[:1]) == wanted[:1]
    assert both < 64 < len(calls) + 2, "one sequence leaves the other micro-batch idle"


@pytest.mark.slow
def test_a_placement_that_is_adopted_is_the_next_steps(tiny_checkpoint, world, calls):
    """Its epoch is in every message from then on, so an expert node that does not know it refuses."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    made, asked = world(source, config()), requests(prompts())
    with made.serving() as node:
        tokens = run(node, asked)
        before = len(calls)
        plan = made.plan
        later = replace(plan, epoch=plan.epoch + 1)
        made.experts[0].accept(later.epoch)
        node.adopt(later)
        assert run(node, asked) == tokens and len(calls) > before
        assert made.link.epoch == later.epoch
        made.experts[0].retire(plan.epoch)
        assert run(node, asked) == tokens
