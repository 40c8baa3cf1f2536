"""How many launches a MoE layer of a decode step takes, and where the host waits: counted over pretended tensors and
Triton's kernels, none of which runs. What a launch costs only a GPU can tell."""

from dataclasses import replace
from itertools import pairwise

import pytest

from afserve.comm.transport import SharedRegion
from afserve.config import ModelSource
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.kernels.ops import Ops
from tests.cuda.pretend import pretended
from tests.engine.driving import config, prompts
from tests.engine.local_cluster import LocalCluster

pytest.importorskip("triton")
DEVICE = "cuda:0"
EXPERTS = 4
# Of a layer: grouped heads alone; a latent, and a shared expert; a state.
MOST = {
    ("mixtral-window", 1): 13,
    ("v3", 1): 20,
    ("qwen3-next", 1): 20,
    ("mixtral-window", 2): 24,
    ("v3", 4): 64,
}
MOST_EXPERT = 8
pytestmark = pytest.mark.usefixtures("pretended_gpus")


class Sharing:
    """An end whose boxes have regions at addresses that nothing reads."""

    def __init__(self, end):
        self._end, self.offers = end, replace(end.offers, regions=self)

    def region(self, box):
        at = 4096 * (1 + box.expert + 16 * box.attention)
        return SharedRegion(at, at, self)

    def __getattr__(self, name):
        return getattr(self._end, name)


def ops_of(place):
    import torch

    from afserve.kernels.triton.backend import TritonBackend

    device = torch.device(place)
    return Ops(TritonBackend(device, multiprocessors=132), device, 1)


def cluster_of(folder, name, **fields):
    return LocalCluster.build(
        ModelSource(str(folder), name),
        config(**{"device": DEVICE, "device_exchange": True, **fields}),
        experts=EXPERTS,
        ops=ops_of(DEVICE),
        wrap=Sharing,
    )


def decode_step(cluster, watch):
    """What one decode step of three sequences launches, by who launched it."""
    for number, prompt in enumerate(prompts((5, 9, 4))):
        params = SamplingParams(max_tokens=8, temperature=0.7, seed=1, top_p=0.9, ignore_eos=True)
        cluster.submit(GenerationRequest(number, prompt, params))
    (node,) = cluster.attention
    while node.stats().steps < 3:
        cluster.step()
    for counted in (watch.waits, watch.pageable, watch.reads):
        counted.clear()
    own: list[str] = []
    theirs: list[list[str]] = [[] for _ in cluster.experts]
    while node.stats().steps < 4:
        watch.launched = own
        node.step()
        for expert, watch.launched in zip(cluster.experts, theirs, strict=True):
            expert.poll()
    watch.launched = None
    return own, theirs


def of_a_layer(launched, first):
    """Between the same kernel of two layers."""
    at = [place for place, name in enumerate(launched) if name == first]
    return [launched[begin:end] for begin, end in pairwise(at)]


@pytest.mark.parametrize(("name", "devices"), MOST)
def test_a_layer_takes_few_launches_and_no_host(name, devices, tiny_checkpoint, kernels, monkeypatch):
    """Over four expert nodes by the devices' exchange; those of several devices of a node are counted together."""
    monkeypatch.setattr("afserve.kernels.triton.backend.reaches", lambda *pair: True)
    monkeypatch.setattr("afserve.engine.build.open_ops", lambda place, *_: ops_of(place))
    with pretended() as watch:
        cluster = cluster_of(tiny_checkpoint(name), name, tensor_parallel=devices)
        own, theirs = decode_step(cluster, watch)
        assert watch.reads == {"aten.copy_ at host_reader.py": 1}
        assert not watch.waits and not watch.pageable
    layers = of_a_layer(own, "plan_nodes")
    assert layers
    assert {len(layer): layer for layer in layers if len(layer) > MOST[name, devices]} == {}
    for launched in theirs:
        layers = of_a_layer(launched, "wait_boxes")
        assert layers
        assert {len(layer): layer for layer in layers if len(layer) > MOST_EXPERT} == {}


def test_a_message_through_a_mailbox_is_one_launch(tiny_checkpoint, kernels, monkeypatch):
    """Rows, slots and weights, to each of four expert nodes."""
    from afserve.comm.m2n.fused_message import fill

    monkeypatch.setattr("afserve.comm.m2n.link.fused_on", lambda device: fill)
    with pretended() as watch:
        cluster = cluster_of(tiny_checkpoint("v3"), "v3", device_exchange=False)
        link, found = cluster.attention[0]._link, []
        dispatch = link.dispatch

        def counted(*given, **named):
            watch.launched = []
            try:
                return dispatch(*given, **named)
            finally:
                found.append(watch.launched)
                watch.launched = None

        monkeypatch.setattr(link, "dispatch", counted)
        cluster.submit(GenerationRequest(0, prompts((5,))[0], SamplingParams(max_tokens=2, temperature=0.0)))
        for _ in range(200):
            cluster.step()
        assert found and all(one == ["fill_message"] * EXPERTS for one in found)
