"""Nodes with memory for some of their experts: the tokens of nodes that hold all, for every size, form and topology."""

import os
import random
import shutil
import threading
from dataclasses import replace

import pytest
import torch

from afserve.comm.m2n.bank import LocalBankLink
from afserve.config import ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, colocated, spec_of, tensors_of
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import CheckpointError, ConfigError
from afserve.families.table import naming_of
from afserve.kernels.ops import open_ops
from afserve.launch.plan.models import CONFIGS
from afserve.models.shards import PAGE, SINGLE
from afserve.models.tier.ahead import load_routers
from afserve.models.tier.bank import TieredBank
from afserve.placement.expert_memory import verdict
from afserve.placement.migrate import fills, stages
from afserve.placement.placement import Placement
from tests.engine.driving import FAMILIES, collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.engine.test_live_migration import shuffled, with_spare
from tests.engine.test_lost_peer import doubled
from tests.engine.test_quantised_checkpoints import FORMS
from tests.models.quantising import quantised

FEW = 8  # tokens of a request
PATIENCE = 60.0


ASKED = requests(prompts(), SamplingParams(max_tokens=FEW, temperature=0.0, ignore_eos=True))


def first_of(expected):
    return [tokens[:FEW] for tokens in expected]


def everything(source):
    spec = spec_of(source)
    return [(layer, expert, expert) for layer in range(spec.moe_layers) for expert in range(spec.experts)]


def memory_for(source, places, kept="auto"):
    """Bytes for so many experts of each layer."""
    spec = spec_of(source)
    return places * spec.moe_layers * build_expert_bank(source, [], 1, expert_dtype=kept).expert_bytes


def bank_of(source, places, kept="auto", ops=None):
    slots, memory = spec_of(source).experts, memory_for(source, places, kept)
    return build_expert_bank(source, everything(source), slots, expert_dtype=kept, memory=memory, ops=ops)


def node_of(source, bank, **fields):
    return build_attention_node(source, config(**fields), LocalBankLink(bank))


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_all_experts_in_memory(name, tiny_checkpoint, expected):
    source = ModelSource(str(tiny_checkpoint(name)), name)
    spec = spec_of(source)
    for places in {spec.top_k, spec.top_k + 1, max(spec.top_k, spec.experts // 2)}:
        bank = bank_of(source, places)
        assert isinstance(bank, TieredBank)
        assert collect(drive(node_of(source, bank), ASKED)) == first_of(expected(name))
        bank.close()


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("topology", [(1, 1), (2, 2)])
@pytest.mark.parametrize("name", FAMILIES[:3])
def test_in_every_topology(name, topology, tiny_checkpoint, expected):
    attention, experts = topology
    source = ModelSource(str(tiny_checkpoint(name)), name)
    memory = memory_for(source, spec_of(source).top_k)
    cluster = LocalCluster.build(
        source,
        config(micro_batches=2, max_batch_tokens=12),
        attention=attention,
        experts=experts,
        expert_memory=memory,
    )
    assert collect(cluster.run(ASKED)) == first_of(expected(name))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8", "w4a16"])
def test_quantised_checkpoints_too(form, tiny_checkpoint, fp8_folder, tmp_path):
    source = ModelSource(str(fp8_folder), "fp8")
    if form == "w4a16":
        source, _ = quantised(tiny_checkpoint("qwen3"), tmp_path, *FORMS[form])
    bank = bank_of(source, spec_of(source).top_k + 1)
    assert collect(drive(node_of(source, bank), ASKED)) == collect(drive(colocated(source, config()), ASKED))
    assert bank.stats().misses
    bank.close()


@pytest.mark.by_day(1)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("kept", ["float32", "bfloat16", "int8", "int4"])
def test_sums_have_the_same_bits(kept, rows, tiny_checkpoint):
    """Whatever is in memory, in one pass or several, and added to other sums."""
    dtype = kept if kept.endswith(("32", "16")) else "bfloat16"
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q", dtype=dtype)
    asked = "auto" if dtype == kept else kept
    spec, draw = spec_of(source), torch.Generator().manual_seed(rows)
    whole = build_expert_bank(source, everything(source), spec.experts, expert_dtype=asked)
    few = bank_of(source, spec.top_k + 1, asked)
    for turn in range(6):
        x = torch.randn(rows, spec.hidden, generator=draw).to(getattr(torch, dtype))
        slot = torch.stack(
            [torch.randperm(spec.experts, generator=draw)[: spec.top_k] for _ in range(rows)]
        ).int()
        slot[slot == turn] = -1
        weight = torch.rand(rows, spec.top_k, generator=draw)
        before = torch.full((rows, spec.hidden), 0.25, dtype=x.dtype if turn % 2 else torch.float32)
        results = []
        for bank in (whole, few):
            results.append(before.clone())
            bank.forward(turn % spec.moe_layers, x, slot, weight, results[-1], add=turn > 2)
        assert torch.equal(*results)
    few.close()


@pytest.mark.slow
def test_the_reference_does_so_too(tiny_checkpoint, expected):
    source, ops = ModelSource(str(tiny_checkpoint("qwen3")), "q"), open_ops(backend="torch")
    bank = bank_of(source, spec_of(source).top_k, ops=ops)
    node = build_attention_node(source, config(), LocalBankLink(bank), ops=ops)
    assert collect(drive(node, ASKED)) == first_of(expected("qwen3"))


@pytest.mark.slow
def test_replicas_move_while_tokens_are_made(tiny_checkpoint, expected):
    source, rng = ModelSource(str(tiny_checkpoint("v3")), "v3"), random.Random(3)
    plain = LocalCluster.build(source, config(), experts=2)
    start = plain.placement
    plain.close()
    slots = start.slots_per_node() + 2
    current = with_spare(start, slots)
    memory = memory_for(source, spec_of(source).top_k + 1)
    cluster = LocalCluster.build(
        source,
        config(micro_batches=2, max_batch_tokens=16),
        attention=2,
        experts=2,
        placement=current,
        expert_memory=memory,
    )
    for request in requests(prompts()):
        cluster.submit(request)
    events, epochs = [], 0
    old: list[int] = []
    pending: list[Placement] = []
    while any(node.busy for node in cluster.attention):
        events += cluster.step()
        if old and all(node.settled for node in cluster.attention):
            cluster.retire(old.pop())
        if not old and not pending:
            pending = list(stages(current, shuffled(rng, start, slots), slots))
        if not old and pending:
            following = pending.pop(0)
            for fill in fills(current, following):
                cluster.banks[fill.node].fill(fill.layer, fill.slot, fill.expert)
            cluster.switch(following)
            old.append(current.epoch)
            current, epochs = following, epochs + 1
    assert collect(events) == expected("v3") and epochs > 5


@pytest.fixture
def cut(tiny_checkpoint, tmp_path):
    """A copy of a checkpoint; what cuts its file to a third, and what puts it back as it was."""
    folder = tmp_path / "cut"
    shutil.copytree(tiny_checkpoint("qwen3"), folder)
    file = folder / "model.safetensors"
    whole, was = file.read_bytes(), file.stat()

    def shorten():
        os.truncate(file, len(whole) // 3)

    def restore():
        with file.open("r+b") as opened:
            opened.write(whole)
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))

    return ModelSource(str(folder), "q"), shorten, restore


@pytest.mark.slow
def test_an_expert_that_cannot_be_read_costs_the_requests_that_need_it(cut, expected, caplog):
    source, shorten, restore = cut
    bank = bank_of(source, spec_of(source).top_k)
    node = node_of(source, bank)
    node.expert_memory = bank.stats
    shorten()
    ends = drive(node, ASKED)
    assert all("not finite" in event.error for event in ends if event.error) and any(e.error for e in ends)
    assert bank.stats().unreadable > 0
    assert "cannot be read, rows that chose it have no sum" in caplog.text
    with pytest.raises(CheckpointError):
        bank.fill(0, 0, 3)
    restore()
    for layer, slot, expert in everything(source):
        bank.fill(layer, slot, expert)
    assert collect(drive(node, ASKED)) == first_of(expected("qwen3"))


@pytest.mark.slow
def test_an_expert_node_goes_on_without_what_it_cannot_read(cut, expected):
    source, shorten, restore = cut
    memory = memory_for(source, spec_of(source).top_k)
    cluster = LocalCluster.build(source, config(), experts=2, expert_memory=memory)
    shorten()
    assert any(event.error for event in cluster.run(ASKED))
    restore()
    assert collect(cluster.run(ASKED)) == first_of(expected("qwen3"))


def test_what_is_counted(tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    spec = spec_of(source)
    bank = bank_of(source, spec.experts // 2)
    drive(node_of(source, bank), ASKED)
    counted = bank.stats()
    assert counted.capacity == counted.resident == spec.moe_layers * (spec.experts // 2)
    assert counted.hits and counted.misses and not counted.unreadable
    assert counted.bytes_read >= counted.misses * bank.expert_bytes
    assert counted.served_10 <= counted.served_25 <= counted.served_50 <= counted.hits + counted.misses
    assert "your traffic ha" in verdict([replace(counted, hits=counted.hits + 1000)])
    bank.close()


@pytest.mark.slow
def test_the_next_layers_experts_are_read_ahead_where_guesses_are_right():
    """Of a model that was trained: rows change little from layer to layer."""
    source = ModelSource(str(CONFIGS / "nano"), "nano")
    bank = bank_of(source, 8)
    one = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    drive(node_of(source, bank), requests(prompts((5,), vocab=2000), one))
    counted = bank.stats()
    assert counted.read_ahead >= counted.ahead_used > counted.read_ahead // 3
    bank.close()


def test_guesses_that_are_wrong_end_the_reading(tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    spec = spec_of(source)
    ops = open_ops()
    ahead = load_routers(spec, tensors_of(source, spec, ops.device), naming_of(spec), torch.float32, ops)
    x, last = torch.randn(2, spec.hidden), spec.moe_layers - 1
    assert ahead.choose(last, x) == [] == ahead.choose(0, torch.randn(65, spec.hidden)) == ahead.order([])
    guessed = ahead.order(ahead.choose(last - 1, x))
    assert len(set(guessed)) == len(guessed) <= 2 * spec.top_k and ahead.is_right
    for _ in range(40):
        ahead.guess(last, guessed)
        ahead.check(last, [])
    assert not ahead.is_right
    for _ in range(40):
        ahead.guess(last, guessed)
        ahead.check(last, guessed)
    assert ahead.is_right


class Scripted:
    """A file whose reads at some places wait for events, and say that they have begun."""

    def __init__(self, past, until, begun):
        self._past, self._until, self._begun = past, until, begun
        self.direct, self.close = past.direct, past.close

    def read_into(self, buffer, offset):
        if offset in self._begun:
            self._begun[offset].set()
        assert offset not in self._until or self._until[offset].wait(PATIENCE)
        return self._past.read_into(buffer, offset)


def test_an_experts_tensors_are_asked_for_at_once_and_packed_while_others_are_read(tiny_checkpoint):
    """Gate comes only after down was asked for, and down only after gate and up were packed."""
    source, ops = ModelSource(str(tiny_checkpoint("qwen3")), "q"), open_ops()
    spec, last = spec_of(source), spec_of(source).experts - 1
    bank, plain = bank_of(source, spec.top_k, ops=ops), bank_of(source, spec.experts)
    shard = bank.bank._source._files._shard(SINGLE)
    names = naming_of(spec).expert(spec.moe_layer_ids[0], last)
    gate, _, down = (shard.found(name).begin // PAGE * PAGE for name in names)
    asked, packed, halves, set_half = threading.Event(), threading.Event(), [], ops.set_half

    def noted(experts, slot, gate_up=(), down_HI=None):
        set_half(experts, slot, gate_up, down_HI)
        halves.append((len(gate_up), down_HI is not None))
        packed.set()

    ops.set_half = noted
    shard.file._past = Scripted(shard.file._past, {gate: asked, down: packed}, {down: asked})
    held = bank._memory.hold(0, [last])
    bank._memory.release(held, bank._memory.wait(held))
    sums = [torch.zeros(1, spec.hidden) for _ in range(2)]
    for one, sum_RH in zip((bank.bank, plain), sums, strict=True):
        slot, weight = torch.tensor([[last]], dtype=torch.int32), torch.ones(1, 1)
        one.forward(0, torch.ones(1, spec.hidden), slot, weight, sum_RH)
    assert halves == [(2, False), (0, True)] and torch.equal(*sums) and not shard.begun
    bank.close()


def test_the_next_router_is_asked_when_reads_for_this_layer_have_begun(tiny_checkpoint):
    """And not at all where all places are this layer's."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    spec, seen = spec_of(source), []
    bank = bank_of(source, spec.top_k)
    choose, named = bank._ahead.choose, range(spec.experts - spec.top_k - 1, spec.experts)

    def noted(layer, x_RH):
        seen.append(bank._memory.missing(layer, named[1:]))
        return choose(layer, x_RH)

    assert bank._memory.missing(0, named[1:])
    bank._ahead.choose = noted
    x, weight = torch.ones(1, spec.hidden), torch.ones(1, spec.top_k + 1)
    for slots in (named[1:], named):
        slot = torch.tensor([list(slots)], dtype=torch.int32)
        bank.forward(0, x, slot, weight[:, : len(slots)], torch.zeros(1, spec.hidden))
    assert seen == [[]]
    bank.close()


def test_reading_ahead_takes_nothing_that_is_in_use(tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    places = spec_of(source).top_k
    memory = bank_of(source, places)._memory
    held = memory.hold(0, range(places))
    memory.fetch(0, [places])
    assert memory.read_ahead == 0 and memory.missing(0, range(places)) == []
    memory.release(held, memory.wait(held))
    memory.fetch(0, [*range(places - 1), places])
    assert memory.read_ahead == 1 and memory.missing(0, range(places + 1)) == [places - 1]
    memory.close()


def test_an_expert_node_without_routers_guesses_nothing(tiny_checkpoint, caplog):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    spec, ops = spec_of(source), open_ops()
    other = ModelSource(str(tiny_checkpoint("mixtral")), "m")
    tensors = tensors_of(other, spec_of(other), ops.device)
    ahead = load_routers(spec, tensors, naming_of(spec), torch.float32, ops)
    assert ahead.choose(0, torch.randn(1, spec.hidden)) == []


@pytest.mark.slow
def test_a_lost_nodes_rows_go_to_replicas_that_are_read(tiny_checkpoint, expected):
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    spec = spec_of(source)
    plain = LocalCluster.build(source, config(), experts=2)
    both = doubled(plain.placement, 2 * plain.placement.slots_per_node())
    plain.close()
    memory = memory_for(source, spec.top_k)
    cluster = LocalCluster.build(source, config(), experts=2, placement=both, expert_memory=memory)
    for request in ASKED:
        cluster.submit(request)
    events = [event for _ in range(12) for event in cluster.step()]
    cluster.lose(1)
    cluster.attention[0].lose(1, "it was killed")
    while cluster.attention[0].busy:
        events += cluster.step()
    assert collect(events) == first_of(expected("v3"))
    assert cluster.banks[0].stats().misses


def test_too_little_memory_is_refused_with_what_is_needed(tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    spec = spec_of(source)
    with pytest.raises(ConfigError, match=f"a token needs {spec.top_k} there"):
        bank_of(source, spec.top_k - 1)


@pytest.mark.slow
def test_memory_for_all_is_the_plain_bank(tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    assert not isinstance(bank_of(source, spec_of(source).experts), TieredBank)
    assert colocated(source, config(expert_memory="1GiB"))
