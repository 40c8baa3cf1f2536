"""Look-up tables whose rows expert nodes give: which rows, what a node does with numbers that are wrong, and tokens
while nodes are lost."""

import random
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from afserve.cli.plan.catalog import load_model
from afserve.cli.plan.tables import table_notes
from afserve.clock import FakeClock
from afserve.comm.m2n.link import ExpertLink
from afserve.comm.m2n.port import ExpertPort
from afserve.comm.transport import WireType
from afserve.comm.transports import connect
from afserve.config import ModelSource
from afserve.engine.build import build_expert_bank, colocated, layout_for, spec_of, tensors_of
from afserve.engine.expert_node import ExpertNode
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.step_plan import Chunk, ChunkKind, StepPlan
from afserve.engine.step.look_ups import LookUps
from afserve.engine.step.meter import Meter
from afserve.errors import CheckpointError, ConfigError
from afserve.families.drafters.dense import draft_model_spec
from afserve.families.reading.ngrams import row_numbers
from afserve.families.table import naming_of, spec_from_config
from afserve.kernels.ops import open_ops
from afserve.launch.plan.footprint import needs
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.wishes import Wishes
from afserve.models.tables.rows import TableRows
from afserve.placement.placement import Placement
from afserve.spec_parts import TableSpec
from tests.engine.driving import collect, config, drive
from tests.engine.local_cluster import LocalCluster
from tests.engine.test_lost_peer import World
from tests.families.conftest import NEW
from tests.families.test_against_transformers import asked
from tests.families.test_published import MODELS

TABLES = [
    TableSpec(131072, 78 * 131072, 256, 4, 4, (2,)),
    TableSpec(11, 16, 4, 5, 1, (3, 7)),
    TableSpec(5, 7, 1, 2, 3, ()),
]


def written_out(table, ids, at):
    """The rows of one token, by sums of whole numbers of any size (arXiv 2601.21204)."""
    found = []
    for head in range(table.heads):
        total, size = 0, table.base + 2 * head + 1
        for back in range(2 + head // table.splits):
            if at - back < 0 or (back and ids[at - back] in table.ends):
                break
            total += ids[at - back] * table.vocab**back
        found.append(sum(table.base + 2 * before + 1 for before in range(head)) + total % size)
    return found


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_a_text_however_it_is_cut(table, seed):
    dice = random.Random(seed)
    texts = [[dice.randrange(table.vocab) for _ in range(dice.randrange(1, 40))] for _ in range(4)]
    for text in texts:
        text[dice.randrange(len(text))] = table.ends[0] if table.ends else 0
        text[-1] = table.vocab - 1
    wanted = [[written_out(table, text, at) for at in range(len(text))] for text in texts]
    counts = [dice.randrange(1, len(text) + 1) for text in texts]
    asked_for = [(text, count) for text, count in zip(texts, counts, strict=True)]
    got = row_numbers(table, asked_for)
    assert got.tolist() == [row for rows, count in zip(wanted, counts, strict=True) for row in rows[-count:]]
    near = [(text[max(0, len(text) - count - table.order + 1) :], count) for text, count in asked_for]
    assert np.array_equal(row_numbers(table, near), got)


@pytest.fixture
def bank(checkpoint):
    """One of two nodes, with the slices of even numbers; the whole table beside it."""
    source = ModelSource(str(checkpoint("longcat-ngram")), "tables")
    spec = spec_of(source)
    rows = TableRows(spec.table, tensors_of(source, spec, torch.device("cpu")), naming_of(spec))
    held = [(layer, e // 2, e) for layer in range(spec.moe_layers) for e in range(0, spec.experts, 2)]
    made = build_expert_bank(source, held, spec.experts // 2, ops=open_ops("cpu", 1))
    starts = spec.table.starts
    whole = torch.cat(
        [rows.read(range(starts[n], starts[n + 1]), [n] * (starts[n + 1] - starts[n])) for n in (0, 1)]
    )
    return made, spec, whole


def looked_up(bank, spec, slots, weights, out=None):
    out_RH = torch.empty((len(slots), spec.hidden)) if out is None else out
    given = torch.tensor(slots, dtype=torch.int32), torch.tensor(weights, dtype=torch.float32)
    bank.forward(spec.look_up_layer, torch.zeros(out_RH.shape), *given, out_RH, out is not None)
    return out_RH


def test_a_node_gives_the_rows_of_its_slices(bank):
    made, spec, whole = bank
    size, width = spec.table.slice_rows(spec.experts), spec.table.width
    wanted = torch.zeros((3, spec.hidden))
    wanted[0, :width] = whole[1]
    slot, inside = 3, 4  # of slice 6
    assert 6 * size >= spec.table.starts[1], "a row of the second head"
    wanted[0, width : 2 * width] = wanted[2, width : 2 * width] = whole[6 * size + 4]
    slots, weights = (
        [[0, slot, -1], [-1, -1, -1], [slot, -1, -1]],
        [[1, inside, 9], [0, 0, 0], [inside, 0, 0]],
    )
    assert torch.equal(looked_up(made, spec, slots, weights), wanted)
    assert torch.equal(looked_up(made, spec, slots, weights, torch.ones((3, spec.hidden))), 1 + wanted)


def test_a_number_outside_of_a_slice_is_never_read(bank, monkeypatch):
    """Whoever sends it gets no row, and others of the message have theirs."""
    made, spec, whole = bank
    size = spec.table.slice_rows(spec.experts)
    made.fill(1, 2, 0)  # of another layer than that whose slots slices are in
    read = []

    def note(rows, numbers, heads):
        read.append(list(numbers))
        return whole[list(numbers)]

    monkeypatch.setattr(TableRows, "read", note)
    wrong = [-1.0, float(size), 0.5, float("nan"), float("inf"), 1e30]
    got = looked_up(made, spec, [[0, -1, -1]] * 7, [[value, 0, 0] for value in (*wrong, 0.0)])
    assert got[:-1].isnan().all() and got[-1].isfinite().all() and read == [[0]]
    last = spec.table.rows - 1  # the last slice has fewer rows than others
    made.fill(0, 4, spec.experts - 1)
    inside = last - (spec.experts - 1) * size
    got = looked_up(made, spec, [[4, -1, -1]] * 2, [[inside, 0, 0], [inside + 1, 0, 0]])
    assert got[0].isfinite().all() and got[1].isnan().all()


def test_an_empty_slot_and_a_file_that_changed_give_no_rows(bank, checkpoint, tmp_path):
    _, spec, _ = bank
    fresh = build_expert_bank(
        ModelSource(str(checkpoint("longcat-ngram")), "tables"), [], spec.experts, ops=open_ops("cpu", 1)
    )
    assert looked_up(fresh, spec, [[0, -1, -1]], [[0, 0, 0]]).isnan().all()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint("longcat-ngram") / name).read_bytes())
    moved = build_expert_bank(ModelSource(str(tmp_path), "moved"), [(0, 0, 0)], 1, ops=open_ops("cpu", 1))
    assert looked_up(moved, spec, [[0, -1, -1]], [[0, 0, 0]]).isfinite().all()
    (tmp_path / "model.safetensors").write_bytes(b"another file")
    assert looked_up(moved, spec, [[0, -1, -1], [-1, -1, -1]], [[0] * 3] * 2)[0].isnan().all()


def test_what_cannot_be_read_ends_no_other_request(bank, checkpoint, monkeypatch):
    made, spec, _ = bank
    slots, insides = [[0, -1, -1]] * 3, [[1, 0, 0], [5, 0, 0], [2, 0, 0]]
    sound = looked_up(made, spec, slots, insides)
    read = TableRows.read

    def refused(self, numbers, heads):
        if 5 in numbers:
            raise CheckpointError("a page of the file cannot be read")
        return read(self, numbers, heads)

    monkeypatch.setattr(TableRows, "read", refused)
    found = looked_up(made, spec, slots, insides)
    assert found[1].isnan().all() and found[[0, 2]].equal(sound[[0, 2]])


class SilentAhead:
    """A link over which what is asked for ahead, as micro-batch 1, is never answered."""

    present = True

    def dispatch(self, x_TX, slice_TK, inside_TK, *, layer, micro_batch):
        return micro_batch, x_TX.shape

    def ready(self, ticket):
        return ticket[0] == 0

    def combine(self, ticket):
        return torch.zeros(ticket[1])


def test_a_step_waits_for_what_was_asked_ahead_only_where_it_needs_it(bank):
    """A prompt that was cancelled in its middle keeps nobody waiting for its rows."""
    _, spec, _ = bank
    words = lambda token_T: torch.zeros((len(token_T), spec.hidden))  # noqa: E731
    model = SimpleNamespace(spec=spec, words=words, ops=SimpleNamespace(device=torch.device("cpu")))
    look_ups = LookUps(0, 1, model, SilentAhead(), Meter(FakeClock()))

    def first_wait(ids, start):
        sequence = Sequence.start(GenerationRequest(1, ids, SamplingParams(max_tokens=9)), 0, frozenset())
        plan = StepPlan(0, (Chunk(sequence, start, 4, start + 4 == len(ids), ChunkKind.PROMPT),))
        return next(look_ups.rows_of(plan, torch.tensor(ids[start : start + 4])), None)

    prompt = tuple(range(20, 28))
    assert first_wait(prompt, 0) is None and first_wait(tuple(range(40, 44)), 0) is None
    assert first_wait(prompt, 4)[0] == 1


class GivenUp(SilentAhead):
    """One over which it is given up after a deadline, all but its first row."""

    def __init__(self):
        self.asked = []

    def dispatch(self, x_TX, slice_TK, inside_TK, *, layer, micro_batch):
        self.asked.append(micro_batch)
        return super().dispatch(x_TX, slice_TK, inside_TK, layer=layer, micro_batch=micro_batch)

    def ready(self, ticket):
        return True

    def combine(self, ticket):
        rows_TX = torch.zeros(ticket[1])
        rows_TX[ticket[0] :] = float("nan") if ticket[0] else 0.0
        return rows_TX

    def take_given_up(self, micro_batch):
        return {at: f"row {at}: no answer" for at in (1, 2, 3)} if micro_batch else {}


def test_who_was_given_up_ahead_is_not_asked_for_a_second_deadline(bank):
    _, spec, _ = bank
    link = GivenUp()
    words = lambda token_T: torch.zeros((len(token_T), spec.hidden))  # noqa: E731
    model = SimpleNamespace(spec=spec, words=words, ops=SimpleNamespace(device=torch.device("cpu")))
    look_ups, ids = LookUps(0, 1, model, link, Meter(FakeClock())), tuple(range(20, 28))
    sequence = Sequence.start(GenerationRequest(1, ids, SamplingParams(max_tokens=9)), 0, frozenset())
    found = []
    for start in (0, 4):
        plan = StepPlan(0, (Chunk(sequence, start, 4, start == 4, ChunkKind.PROMPT),))
        link.asked.clear()
        with pytest.raises(StopIteration) as ended:
            next(look_ups.rows_of(plan, torch.tensor(ids[start : start + 4])))
        found.append(ended.value.value)
    (whole_TX, nothing), (rows_TX, why) = found
    assert whole_TX.isfinite().all() and nothing == {} and link.asked == []
    assert rows_TX[0].isfinite().all() and rows_TX[1:].isnan().all()
    assert why == {at: f"row {at}: no answer" for at in (1, 2, 3)}


@pytest.mark.parametrize("wire", ["local", "shm", "tcp"])
@pytest.mark.parametrize("rows", [WireType.FLOAT32, WireType.FLOAT8])
def test_rows_over_each_wire(wire, rows, bank, checkpoint):
    """Of two nodes. What travels beside a row's number may be rounded."""
    _, spec, whole = bank
    source = ModelSource(str(checkpoint("longcat-ngram")), "tables")
    placement = Placement.contiguous(layers=spec.moe_layers, experts=spec.experts, nodes=2)
    layout = replace(layout_for(source, spec, config(), spec.experts // 2), dispatch_wire=rows)
    ends = [connect.listen(wire, expert=node, attention_nodes=1, layout=layout) for node in (0, 1)]
    nodes = []
    for node, (end, _) in enumerate(ends):
        held = build_expert_bank(source, placement.held(node), layout.slots, ops=open_ops("cpu", 1))
        nodes.append(ExpertNode(ExpertPort(end), held))
    to = connect.connect([address for _, address in ends], attention=0, layout=layout, timeout=60.0)
    link = ExpertLink(to, attention=0, layout=layout, placement=placement)
    number_TN = torch.from_numpy(row_numbers(spec.table, [([5, 9, 210, 7, 3, 5, 9], 7)]))
    size, width = spec.table.slice_rows(spec.experts), spec.table.width
    slice_TK, inside_TK = torch.full((7, spec.top_k), -1), torch.zeros((7, spec.top_k))
    slice_TK[:, :2], inside_TK[:, :2] = number_TN // size, (number_TN % size).float()
    x_TH = torch.randn(7, spec.hidden)
    ticket = link.dispatch(x_TH, slice_TK, inside_TK, layer=spec.look_up_layer, micro_batch=1)
    until = time.monotonic() + 30
    while not link.ready(ticket) and time.monotonic() < until:
        link.wait([ticket], 0.01)
        for one in nodes:
            one.poll()
    got = link.combine(ticket)
    assert torch.equal(got[:, : 2 * width], whole[number_TN].flatten(1)) and not got[:, 2 * width :].any()
    for one in (link, *nodes):
        one.close()


def test_what_a_host_does_in_each_step_is_refused_by_its_flag(checkpoint):
    source = ModelSource(str(checkpoint("longcat-ngram")), "tables")
    with pytest.raises(ConfigError, match="--device-exchange"):
        LocalCluster.build(source, config(device_exchange=True), experts=2)
    with pytest.raises(ConfigError, match="--step-graphs"):
        colocated(source, config(step_graphs=True))
    with pytest.raises(ConfigError, match="look-up table"):
        draft_model_spec(source.path)


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [8, 1, 2, 13])
def test_nobody_notices_that_a_node_with_slices_is_lost(seed, checkpoint, continued):
    """With replicas and without: another epoch has the slices elsewhere, or a successor comes."""
    name = "longcat-ngram-odd"
    source = ModelSource(str(checkpoint(name)), name)
    world = World(seed, source, NEW, 1 + seed % 2, replicas=bool(seed // 8), delay=0)
    assert collect(world.run()) == continued(name) and world.losses


def test_a_slice_that_is_on_no_node_is_said(checkpoint):
    """Its requests end with the reason, once it was waited for."""
    source, clock = ModelSource(str(checkpoint("longcat-ngram")), "tables"), FakeClock()
    cluster = LocalCluster.build(source, config(), experts=2, clock=clock)
    cluster.lose(1)
    (node,) = cluster.attention
    cluster.submit(asked()[0])
    for _ in range(20):
        assert cluster.step() == []
    clock.advance(31.0)
    events = []
    for _ in range(200):
        events += cluster.step()
        if node.stalled:
            node.wait(0.0)
    assert not node.busy and "expert-1: it has closed its transport" in events[-1].error


def test_a_row_that_nobody_gave_is_marked_before_keys_leave(checkpoint):
    """Other nodes with part in a prompt take a layer's keys only where no row was marked by then."""
    source = ModelSource(str(checkpoint("longcat-ngram")), "tables")
    (node,) = LocalCluster.build(source, config(), experts=2).attention
    rows_TX = torch.zeros(3, spec_of(source).expert_width)
    rows_TX[1, 0] = torch.nan
    step = SimpleNamespace(
        token_T=torch.tensor([5, 6, 7]),
        looked_up_TX=rows_TX,
        not_looked_up={},
        placed=None,
        paged=SimpleNamespace(starts=(0, 3)),
    )
    _, marks_T = node._micro_batches[0]._runner.begin_step(step)
    assert marks_T.tolist() == [-1, 0, -1]


def test_rows_of_a_next_chunk_are_asked_for_while_one_is_computed(checkpoint):
    """So a step whose tokens all were foreseen asks for nothing. Statistics count look-ups with the dispatches."""
    source = ModelSource(str(checkpoint("longcat-ngram")), "tables")
    cluster = LocalCluster.build(source, config(max_batch_tokens=10), experts=2)
    link, spec, prompt = cluster.attention[0]._link, spec_of(source), tuple(range(20, 53))
    dispatch, rows, layers = link.dispatch, [], []

    def note(x_TH, expert_TK, weight_TK, *, layer, micro_batch):
        layers.append(layer)
        if layer == spec.look_up_layer:
            rows.append((micro_batch, int((expert_TK >= 0).any(1).sum())))
        return dispatch(x_TH, expert_TK, weight_TK, layer=layer, micro_batch=micro_batch)

    link.dispatch = note
    list(
        cluster.run(
            [GenerationRequest(0, prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))]
        )
    )
    assert rows == [(0, 10), (1, 10), (1, 10), (1, 3), (0, 1)]
    assert cluster.attention[0].stats().dispatches == len(layers)


@pytest.mark.slow
def test_drafts_give_the_same_tokens(checkpoint, continued):
    """A draft's rows are looked up with it."""
    source = ModelSource(str(checkpoint("longcat-ngram")), "tables")
    cluster = LocalCluster.build(source, config(draft="ngram:3", micro_batches=2), attention=1, experts=3)
    assert collect(cluster.run(asked())) == continued("longcat-ngram")
    assert cluster.attention[0].stats().drafts.verified


@pytest.mark.slow
def test_experts_that_do_not_fit_are_beside_a_table(checkpoint, continued):
    """Three of five experts of each layer have room; slices need none."""
    source = ModelSource(str(checkpoint("longcat-ngram")), "tables")
    cluster = LocalCluster.build(source, config(), experts=2, expert_memory=90_000)
    assert collect(cluster.run(asked())) == continued("longcat-ngram")
    assert cluster.banks[0].stats().capacity == 6


@pytest.mark.slow
def test_random_weights_have_rows_too(checkpoint):
    """Each process makes the same ones."""
    source = ModelSource(str(checkpoint("longcat-ngram")), "tables", load_format="dummy")
    said = collect(drive(colocated(source, config()), asked()))
    assert collect(LocalCluster.build(source, config(), experts=3).run(asked())) == said


def test_planners_say_how_large_a_table_is(checkpoint):
    """In the plan of a fleet, and in what a machine would need."""
    (said,) = table_notes(load_model("longcat-flash-lite"))
    assert "look-up table of 31.4B numbers, 59 GiB in 16 bits" in said
    assert table_notes(load_model("longcat-flash-chat")) == []
    spec = spec_from_config(MODELS["longcat-flash-lite"])
    source = ModelSource(str(checkpoint("longcat-ngram")), "tables", dtype="bfloat16")
    words = needs(spec, source, Machine(8, 64 << 30, 64 << 30, ""), Wishes())
    assert re.search(
        r"table +58\.5 GiB that expert nodes read from the checkpoint row by row, not loaded", words
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"emb_split_num": 40}, "emb_split_num"), ({"emb_neighbor_num": 1}, "emb_neighbor_num"),
     ({"ngram_vocab_size_ratio": 0}, "ngram_vocab_size_ratio")],
)  # fmt: skip
def test_a_table_of_no_use_is_refused_by_its_field(fields, why, checkpoint, tmp_path):
    import json

    config_json = json.loads((checkpoint("longcat-ngram") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config_json, **fields}))
    with pytest.raises(CheckpointError, match=why):
        spec_of(ModelSource(str(tmp_path), "odd"))
