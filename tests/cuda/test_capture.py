"""What a decode step launches can be recorded: over pretended tensors and Triton's kernels, none of which runs, the
host reads nothing, copies nothing to the device, and launches the same with the same shapes from step to step.

Kernels are imported by a test, not with this file: `tests/kernels/triton` has them interpreted, where it is run too.
"""

import pytest
import torch

from afserve.comm.m2n.bank import LocalBankLink
from afserve.config import ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, spec_of
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.errors import ConfigError
from afserve.kernels.ops import Ops
from afserve.kernels.reference import Reference
from afserve.models.devices.several import Devices
from tests.cuda.pretend import PretendedDevice, pretended
from tests.engine.driving import config, prompts
from tests.families.tiny import build

pytest.importorskip("triton")
DEVICE = torch.device("cuda:0")
STEPS = 12
pytestmark = pytest.mark.usefixtures("pretended_gpus")


def node_of(folder, name, devices=1, backend=None, **fields):
    from afserve.kernels.triton.backend import TritonBackend

    places = [torch.device("cuda", number) for number in range(devices)]
    made = [backend or TritonBackend(place, multiprocessors=132) for place in places]
    ops, *further = (Ops(*one, 1) for one in zip(made, places, strict=True))
    fields = {"device": str(DEVICE), "step_graphs": True, "micro_batches": 1, **fields}
    source = ModelSource(str(folder), name)
    spec = spec_of(source)
    held = [(layer, expert, expert) for layer in range(spec.moe_layers) for expert in range(spec.experts)]
    link = LocalBankLink(build_expert_bank(source, held, spec.experts, ops=ops))
    several = Devices(ops, further) if further else None
    return build_attention_node(source, config(**fields), link, ops=ops, devices=several)


def decode(node, sequences=3):
    for number, prompt in enumerate(prompts((5, 9, 4))[:sequences]):
        params = SamplingParams(max_tokens=STEPS, temperature=0.7, seed=1, top_p=0.9, ignore_eos=True)
        node.submit(GenerationRequest(number, prompt, params))
    while node.busy:
        node.step()


STATES = ["kimi-linear-odd", "granite4-odd", "lfm2", "ling-odd", "qwen3.5"]  # by night; nemotron by day


@pytest.mark.parametrize(
    "name",
    ["v3", "v2-groups", "qwen3", "mixtral-window", "qwen3-next", "nemotron"]
    + [pytest.param(name, marks=pytest.mark.long) for name in STATES],
)
def test_a_step_can_be_recorded(name, tiny_checkpoint, tmp_path, kernels):
    folder = build(name, tmp_path) if name in (*STATES, "nemotron") else tiny_checkpoint(name)
    PretendedDevice.recordings.clear()
    with pretended() as watch:
        node = node_of(folder, name)
        watch.pageable.clear()
        decode(node)
        (runner,) = (one._runner for one in node._micro_batches)
        assert not runner.why and runner.replayed > 5
        assert len(PretendedDevice.recordings) == 1, "all steps are of one size"
        (times,) = PretendedDevice.recordings
        assert len(times[0]) > 20
        for one in times[2:]:  # the one before it found the sums of the recording
            assert one == times[0]
        assert not watch.pageable


@pytest.mark.parametrize(("name", "devices"), [("qwen3", 2), ("qwen3", 4), ("v3", 2), ("v3", 4)])
def test_a_step_on_several_devices_is_one_recording(name, devices, tiny_checkpoint, kernels, monkeypatch):
    """With what they add: one kernel reads it where it lies. What each device copies of a batch's integers is recorded,
    or a replay would read those of the step that was recorded."""
    monkeypatch.setattr("afserve.kernels.triton.backend.reaches", lambda *pair: True)
    PretendedDevice.recordings.clear()
    with pretended() as watch:
        node = node_of(tiny_checkpoint(name), name, devices)
        watch.pageable.clear()
        decode(node)
        (runner,) = (one._runner for one in node._micro_batches)
        assert not runner.why and runner.replayed > 5 and not watch.pageable
        (times,) = PretendedDevice.recordings
        assert all(one == times[0] for one in times[2:])
        (size,) = runner._sizes
        table = (size.rows, *size.widths)
        copied = [
            shapes for operation, shapes in times[0] if operation == "aten._to_copy" and shapes[0] == table
        ]
        assert len(copied) == devices - 1
    layers = spec_of(ModelSource(str(tiny_checkpoint(name)), name)).layers
    joints = sum(kernel == "_add_parts" for kernel, _ in kernels)
    assert joints >= layers * node.stats().steps, "once in each layer at least"


def test_kernels_are_launched_alike_from_step_to_step(tiny_checkpoint, kernels):
    with pretended():
        node = node_of(tiny_checkpoint("v3"), "v3")
        (runner,) = (one._runner for one in node._micro_batches)
        replays = []
        record = runner._record

        def recorded(known):
            replay = record(known)

            def replayed():
                kernels.clear()
                replay()
                replays.append(list(kernels))

            return replayed

        runner._record = recorded
        decode(node)
        assert len(replays) > 5 and len(replays[0]) > 20 and all(one == replays[0] for one in replays)


def test_rows_of_the_host_are_fetched_without_waiting(tiny_checkpoint, kernels):
    """Latents are in pinned memory that kernels address, all else is the device's; blocks have both."""
    with pretended() as watch:
        node = node_of(tiny_checkpoint("dsa"), "dsa", kv_near_rows=24)
        kinds = {tuple(tensor.device.type for tensor in cache) for cache in node.kv._memory.layers}
        assert kinds == {("cpu", "cuda"), ("cpu",)} and all(near is not None for near in node.kv.near)
        watch.pageable.clear()
        decode(node)
        assert not watch.waits and not watch.pageable
        (block,) = node.kv.pool.allocate(1)
        node.kv.write([block], node.kv.read([block]))
        with pytest.raises(
            ConfigError, match=r"^--kv-near-rows: cuda:0 reads rows of the host by Triton's kernels"
        ):
            node_of(tiny_checkpoint("dsa"), "dsa", backend=Reference(DEVICE), kv_near_rows=24)
