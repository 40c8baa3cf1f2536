"""Decode steps that are recorded once for each size: the tokens of steps that go layer by layer, and when they do not.

The device records Python calls (`recording_device.py`): what differs on a GPU is in the capture check of `tests/cuda`.
"""

import random

import pytest
import torch

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.step import choose
from afserve.engine.step.graph_runner import GraphRunner
from afserve.engine.step.padded_step import NotRecordable, PaddedStep, StepSize, Unsaid
from afserve.errors import ConfigError
from afserve.kernels import native
from afserve.kernels.reference import Reference
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.engine.recording_device import RecordingDevice
from tests.engine.step_inputs import decode_step

DRAWN = SamplingParams(max_tokens=24, temperature=0.8, seed=4, ignore_eos=True)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> list[RecordingDevice]:
    """The devices of all nodes that are built from now on."""
    made: list[RecordingDevice] = []

    def opened(where: torch.device) -> RecordingDevice:
        made.append(RecordingDevice(where))
        return made[-1]

    monkeypatch.setattr(choose, "device_of", opened)
    return made


def runners_of(node) -> list[GraphRunner]:
    return [micro_batch._runner for micro_batch in node._micro_batches]


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are moved as on GPUs: all of a step's are read before one is written."""
    for op in ("delta", "prepare_states"):
        monkeypatch.setattr(native.Native, op, getattr(Reference, op))


GRAPHS = {"v3": 2, "v2-groups": 1, "qwen3": 4, "mixtral-window": 1, "late": 1, "qwen3-next": 1}  # devices


@pytest.mark.parametrize("name", GRAPHS)
def test_the_same_tokens_as_layer_by_layer(name, tiny_checkpoint, recording, request):
    if name == "qwen3-next":
        request.getfixturevalue("by_torch")
    source = ModelSource(str(tiny_checkpoint(name)), name)
    asked = requests(prompts((5, 11, 3, 17, 9)), DRAWN)
    wanted = collect(drive(colocated(source, config(micro_batches=2)), asked))
    node = colocated(source, config(micro_batches=2, step_graphs=True, tensor_parallel=GRAPHS[name]))
    assert collect(drive(node, asked)) == wanted
    assert all(not runner.why and runner.replayed > 5 for runner in runners_of(node))
    device = recording[-1]
    sizes = sum(len(one._sizes) for one in runners_of(node))
    assert 0 < device.recorded <= sizes < device.replayed


def test_the_same_experts_are_counted(tiny_checkpoint, recording):
    """None of the padding."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    found = []
    for graphs in (False, True):
        node = colocated(source, config(step_graphs=graphs))
        drive(node, requests(prompts((5, 4, 7)), DRAWN))
        found.append(node._load.take())
    assert recording[-1].replayed
    assert (found[0].decode_LE == found[1].decode_LE).all() and found[0].decode_LE.sum() > 0


def test_what_cannot_be_recorded_goes_layer_by_layer(tiny_checkpoint, recording):
    source = ModelSource(str(tiny_checkpoint("dsa")), "dsa")
    asked = requests(prompts((5, 11)), DRAWN)
    wanted = collect(drive(colocated(source, config()), asked))
    node = colocated(source, config(step_graphs=True))
    assert collect(drive(node, asked)) == wanted
    (runner,) = runners_of(node)
    assert runner.why.startswith("a layer reads contexts on the host") and not recording[-1].recorded


@pytest.mark.usefixtures("by_torch")
def test_states_that_moved_on_before_a_step_could_not_be_recorded(tiny_checkpoint, recording, monkeypatch):
    """Sequences of that step begin again; later ones go layer by layer."""
    source = ModelSource(str(tiny_checkpoint("qwen3-next")), "qwen3-next")
    asked = requests(prompts((5, 11)), DRAWN)
    wanted = collect(drive(colocated(source, config()), asked))
    node = colocated(source, config(step_graphs=True))
    (runner,) = runners_of(node)
    compute = runner._compute

    def waiting(step):
        compute(step)
        raise NotRecordable("the host has to wait")

    monkeypatch.setattr(runner, "_compute", waiting)
    assert collect(drive(node, asked)) == wanted
    assert runner.why and node.stats().preemptions == 2


def test_a_device_that_refuses_costs_no_token(tiny_checkpoint, recording, caplog):
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    asked = requests(prompts((5, 11)), DRAWN)
    wanted = collect(drive(colocated(source, config()), asked))
    node = colocated(source, config(step_graphs=True))
    recording[-1].refuses = "operation not permitted when stream is capturing"
    assert collect(drive(node, asked)) == wanted
    assert (
        "go layer by layer: operation not permitted" in caplog.text
        and caplog.text.count("layer by layer") == 1
    )


def test_drafts_prompts_and_traces_go_layer_by_layer(tiny_checkpoint, recording):
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    node = colocated(source, config(step_graphs=True, draft="ngram:3"))
    prompt = tuple([7, 8, 9] * 8)
    node.submit(GenerationRequest(0, prompt, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)))
    events = []
    while node.busy:
        events += node.step()
    assert sum(len(event.token_ids) for event in events) == 20
    assert node.stats().drafts.tokens


def test_a_spoiled_row_of_the_padding_spoils_no_later_step(tiny_checkpoint, recording):
    node = colocated(ModelSource(str(tiny_checkpoint("v3")), "v3"), config(step_graphs=True))
    (runner,) = runners_of(node)
    step = decode_step(3)
    marks_T = runner._layers._spoiled.of(tuple(range(5)))
    marks_T[3] = 1  # a row of the padding
    runner._layers.keep_rows(step)
    assert not runner.take_failures()
    assert runner._layers._spoiled.of(tuple(range(9))).tolist() == [-1] * 8


def test_one_size_takes_every_step_that_fits_it():
    draw, addresses = random.Random(3), set()
    padded = PaddedStep(StepSize(8, 256, (64,)), torch.device("cpu"))
    for _ in range(50):
        step = decode_step(draw.randint(5, 8), draw.randint(1, 200), draw)
        assert StepSize.of(step, 256) == StepSize(8, 256, (64,))
        padded.fill(step)
        made, rows = padded.step, step.tokens
        addresses.add(
            tuple(t.data_ptr() for t in (made.token_T, made.paged.kv_slot_T, made.paged.block_table_SB))
        )
        for whole, own in ((made.token_T, step.token_T), (made.paged.context_S, step.paged.context_S)):
            assert whole[:rows].tolist() == own.tolist() and set(whole[rows:].tolist()) <= {int(own[0])}
        assert made.paged.kv_slot_T[rows:].tolist() == [int(step.paged.kv_slot_T[0])] * (8 - rows)
        assert torch.equal(made.paged.block_table_SB[:rows, :4], step.paged.block_table_SB)
    assert len(addresses) == 1


def test_sizes_are_few_and_hardly_larger():
    sizes = [StepSize.of(decode_step(rows, 9), 100).rows for rows in range(1, 101)]
    assert all(rows <= size < rows + 8 for rows, size in enumerate(sizes, 1)) and len(set(sizes)) == 16
    assert StepSize.of(decode_step(3, 9), 3).rows == 3


@pytest.mark.parametrize("read", [list, bool, len, lambda unsaid: unsaid[0]])
def test_what_is_unsaid_cannot_be_read(read):
    with pytest.raises(NotRecordable, match="contexts"):
        read(Unsaid((1, 2)))


def test_what_cannot_record_says_so_at_start(tiny_checkpoint):
    with pytest.raises(
        ConfigError, match="--step-graphs: launches are recorded on GPUs; leave it out on cpu"
    ):
        colocated(ModelSource(str(tiny_checkpoint("v3")), "v3"), config(step_graphs=True))


def test_expert_nodes_without_an_exchange_are_refused(tiny_checkpoint, recording):
    with pytest.raises(ConfigError, match="--step-graphs: over expert nodes it takes --device-exchange"):
        LocalCluster.build(ModelSource(str(tiny_checkpoint("v3")), "v3"), config(step_graphs=True))
