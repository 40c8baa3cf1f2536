"""One AFD step of each family with everything on a GPU, which is a pretended one: where tensors are and who waits.

The reference backend computes nothing here; what is proved is the path around it: dispatch, arrival, merge, reply,
combine, statistics, sampling. With real contents the same path runs on the CPU (`tests/engine`) and on a GPU
(`bench.gpu_first_run`).
"""

from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from afserve.config import ModelSource
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.warm import warm_experts
from afserve.families.table import load_spec
from afserve.kernels.ops import open_ops
from afserve.placement.placement import FREE, LayerPlacement, Placement
from tests.cuda.pretend import pretended, pretended_stage
from tests.engine.driving import FAMILIES, config, prompts
from tests.engine.local_cluster import LocalCluster

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("pretended_gpus")


TOKENS = "aten.copy_ at host_reader.py"
DEVICE = "cuda:0"
LONG = pytest.mark.long
OF_THEIR_KIND = ("mixtral-window", "qwen3-next", "dsa")


class Asked(Future):
    """Done by whoever waits for it: no other thread has the pretended device."""

    def __init__(self, call):
        super().__init__()
        self._call = call

    def result(self, timeout=None):
        if not self.done():
            self.set_result(self._call())
        return super().result(timeout)


class AtHand:
    """As `ThreadPoolExecutor`."""

    def __init__(self, workers, name):
        self.submitted = 0

    def submit(self, call, *args):
        self.submitted += 1
        return Asked(partial(call, *args))

    def shutdown(self, **how):
        return


def cluster_of(source, attention=1, experts=2, placement=None, **fields):
    return LocalCluster.build(
        source,
        config(device=DEVICE, **fields),
        attention=attention,
        experts=experts,
        placement=placement,
        ops=open_ops(DEVICE, 1, "torch"),
    )


def submit(cluster, params=GREEDY, texts=None):
    for number, prompt in enumerate(texts or prompts()[:2]):
        cluster.submit(GenerationRequest(number, prompt, params))


def run_steps(cluster, steps):
    """Until every attention node has completed so many steps; the events."""
    events = []
    for _ in range(2000):
        if min(node.stats().steps for node in cluster.attention) >= steps:
            return events
        events += cluster.step()
    raise AssertionError("no step was completed")


def finish(cluster):
    events = []
    for _ in range(5000):
        events += cluster.step()
        if not any(node.busy for node in cluster.attention):
            return events
    raise AssertionError("still busy")


@pytest.mark.parametrize("name", [*FAMILIES, "late"])
def test_no_layer_waits_for_the_device(name, tiny_checkpoint):
    """Nor does a step: its tokens, and whether a row was spoiled, come to the host in one copy, which it asks for now
    and then. The first step reads prompts, the third decodes."""
    with pretended() as watch:
        cluster = cluster_of(ModelSource(str(tiny_checkpoint(name)), name))
        submit(cluster)
        for before in (0, 2):
            run_steps(cluster, before)
            watch.reads.clear()
            launched = watch.launches
            run_steps(cluster, before + 1)
            assert watch.reads == {TOKENS: 1} and not watch.waits
            assert watch.launches > launched + 100


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("v3", (2, 3)), *((name, (1, 1)) for name in OF_THEIR_KIND),
        *(pytest.param(name, (1, 1), marks=LONG) for name in FAMILIES if name not in OF_THEIR_KIND),
        *(pytest.param(name, (2, 3), marks=LONG) for name in FAMILIES if name != "v3"),
    ],
)  # fmt: skip
def test_whole_requests(name, topology, tiny_checkpoint):
    """Chunked prefill, several micro-batches, prefix hits and preemption: all tensors are where they should be.

    By day one family over several nodes, and over one of each kind those that keep something else for a token."""
    with pretended() as watch:
        attention, experts = topology
        source = ModelSource(str(tiny_checkpoint(name)), name)
        cluster = cluster_of(source, attention, experts, micro_batches=2, max_batch_tokens=12, kv_blocks=4)
        for _ in range(2):  # each node has two, whose first tokens take the blocks that both need next
            submit(cluster, texts=prompts(sorted((8, 16) * attention)))
            events = finish(cluster)
            ended = {e.handle: e for e in events if e.finish_reason is not None}
            assert {e.finish_reason for e in ended.values()} == {"length"} and len(ended) == 2 * attention
        assert set(watch.reads) == {TOKENS} and not watch.waits
        counts = [node.stats() for node in cluster.attention]
        assert all(one.preemptions for one in counts) and sum(one.prefix_hits for one in counts)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("attention", "experts"), [(DEVICE, "cpu"), ("cpu", DEVICE)], ids=["experts on CPUs", "attention on CPUs"]
)
@pytest.mark.parametrize("name", ["qwen3", "v3"])
def test_attention_and_experts_on_different_devices(name, attention, experts, tiny_checkpoint, monkeypatch):
    """Rows cross in host memory, each side works on its own device, and requests end."""
    for end in ("link", "port"):
        monkeypatch.setattr(f"afserve.comm.m2n.{end}.stage_for", pretended_stage)
    with pretended() as watch:
        cluster = LocalCluster.build(
            ModelSource(str(tiny_checkpoint(name)), name),
            config(device=attention, micro_batches=2, max_batch_tokens=12),
            experts=2,
            ops=open_ops(attention, 1, "torch"),
            expert_ops=open_ops(experts, 1, "torch"),
        )
        submit(cluster, texts=prompts((5, 9, 17)))
        events = finish(cluster)
        assert [e.finish_reason for e in events if e.finish_reason is not None] == ["length"] * 3
        assert watch.launches > 100 and sum(node.stats().rows for node in cluster.experts) > 0


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7, "seed": 1, "top_p": 0.9},
        {
            "temperature": 1.0,
            "seed": 2,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.5,
            "logit_bias": ((3, 1.0),),
        },
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (5,)},
    ],
)
def test_sampling_brings_nothing_but_tokens_and_scores_to_the_host(params, tiny_checkpoint):
    sampling = SamplingParams(max_tokens=4, **params)
    with pretended() as watch:
        cluster = cluster_of(ModelSource(str(tiny_checkpoint("v3")), "v3"))
        submit(cluster, sampling)
        run_steps(cluster, 2)
        watch.waits.clear()
        watch.pageable.clear()
        run_steps(cluster, 3)
        assert not watch.waits and set(watch.reads) == {TOKENS} and not watch.pageable


def test_counting_rows_waits_when_they_are_taken_and_not_before(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr("afserve.engine.step.load.KEPT", 3)
    with pretended() as watch:
        cluster = cluster_of(ModelSource(str(tiny_checkpoint("v3")), "v3"))
        submit(cluster, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
        finish(cluster)  # more steps than may wait to be counted
        assert not watch.waits
        counted = cluster.attention[0]._load._steps[0][0].take()
        assert watch.waits["aten._to_copy at load.py"] == 1
        assert counted.device.type == "cpu" and counted.shape == (2, 12)


def test_migration_fills_and_routes_on_the_device(tiny_checkpoint):
    """Replicas with shares, a slot filled while serving, and another epoch's route tables."""
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    spec = load_spec(source.path)
    everything = tuple(range(spec.experts))
    both = LayerPlacement(
        ((*everything, FREE), (*everything, FREE)),
        ((*(0.25,) * spec.experts, 0.0), (*(0.75,) * spec.experts, 0.0)),
    )
    plan = Placement(0, 2, spec.experts, (both,) * spec.moe_layers)
    with pretended() as watch:
        cluster = cluster_of(source, placement=plan)
        submit(cluster)
        run_steps(cluster, 1)
        cluster.banks[0].fill(0, spec.experts, 3)
        cluster.switch(plan.with_epoch(1))
        finish(cluster)
        cluster.retire(0)
        assert not watch.waits


@pytest.mark.parametrize("in_host", [True, False])
def test_with_memory_for_some_experts_a_call_waits_for_its_choices_alone(
    in_host, tiny_checkpoint, monkeypatch
):
    """Once, and for no copy; one that comes from the host's memory is known to the device before it is there."""
    monkeypatch.setattr("afserve.models.tier.memory.ThreadPoolExecutor", AtHand)
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    spec = load_spec(source.path)
    places = spec.top_k + 1
    with pretended() as watch:
        memory = places * spec.moe_layers * cluster_of(source, experts=1).banks[0].expert_bytes
        fields = config(device=DEVICE, experts_in_host=in_host)
        ops = open_ops(DEVICE, 1, "torch")
        cluster = LocalCluster.build(source, fields, ops=ops, expert_memory=memory)
        bank, node = cluster.banks[0], cluster.experts[0]
        submit(cluster)
        run_steps(cluster, 2)
        calls = node.stats().calls
        watch.waits.clear()
        watch.pageable.clear()
        run_steps(cluster, 4)
        told = bank.stats()
        warm_experts(
            bank, spec.moe_layers, torch.empty(0, spec.hidden, device=DEVICE), spec.top_k, spec.experts, 20
        )
        assert bank.stats() == told, "nothing is brought for it"
        assert watch.waits == {"event at staging.py": node.stats().calls - calls} and not watch.pageable
        watch.waits.clear()
        held = bank._memory.hold(0, [places])
        bank._memory.release(held, bank._memory.wait(held))
        assert not watch.waits and bool(watch.pageable) != in_host
        told = bank.stats()
        assert told.resident == told.capacity and (told.bytes_copied == bank.expert_bytes) == in_host
        finish(cluster)
        bank.close()


def test_fp8_rows_on_the_device(tiny_checkpoint):
    """Rows in e4m3 with their scales: rounded, sent and widened there."""
    from afserve.comm.mailbox.fp8 import dequantise, quantise

    with pretended() as watch:
        x_RH = torch.randn(5, 200, device=DEVICE)
        value_RH = torch.empty(5, 200, dtype=torch.float8_e4m3fn, device=DEVICE)
        scale_RS = torch.empty(5, 2, device=DEVICE)
        quantise(x_RH, value_RH, scale_RS)
        assert dequantise(value_RH, scale_RS).device == torch.device(DEVICE)
        assert not watch.waits


def test_a_mix_of_devices_is_caught_where_it_happens():
    """What PyTorch's own fake mode lets pass: an index of another device, and an assignment to one."""
    with pretended():
        table, ids = torch.zeros(7), torch.zeros(3, dtype=torch.int64, device=DEVICE)
        with pytest.raises(
            AssertionError, match=r"aten.index.Tensor got tensors of cpu, cuda:0 at test_devices.py"
        ):
            _ = table[ids]
        with pytest.raises(AssertionError, match=r"aten.index_put"):
            table[ids] = torch.ones(3, device=DEVICE)
        with pytest.raises(AssertionError, match="got tensors of cpu, cuda:0"):
            torch.ones(2, 2) @ torch.ones(2, 2, device=DEVICE)


def test_what_waits_is_counted():
    with pretended() as watch:
        x = torch.ones(4, device=DEVICE)
        x.sum().item()
        x.cpu()
        x.to("cpu", non_blocking=True)
        assert sum(watch.waits.values()) == 2


class Queues:
    """As `DeviceQueuePair`: which queue each call was launched in; all is done at once."""

    def __init__(self):
        self.log = []

    def decoding(self, *tensors):
        return self._in("decoding", tensors)

    def prompts(self, *tensors):
        return self._in("prompts", tensors)

    @contextmanager
    def _in(self, queue, tensors):
        assert all(x.device == torch.device(DEVICE) for x in tensors)
        self.log.append(queue)
        yield

    def mark(self):
        return self

    def done(self):
        return True

    def wait(self):
        return

    def seconds_since(self, earlier):
        return 0.0


def test_prompts_have_a_queue_of_their_own_on_a_device(tiny_checkpoint, monkeypatch):
    queues = Queues()
    monkeypatch.setattr("tests.engine.local_cluster.queues_of", lambda device: queues)
    monkeypatch.setattr("afserve.engine.expert_node._LONG_ROWS", 4)
    with pretended() as watch:
        cluster = cluster_of(ModelSource(str(tiny_checkpoint("v3")), "v3"))
        submit(cluster, texts=prompts()[:1])
        assert any(event.finish_reason == "length" for event in finish(cluster))
        assert {"prompts", "decoding"} == set(queues.log) and not watch.waits
        assert queues.log[-1] == "decoding"
