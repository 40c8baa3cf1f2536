"""The offline door over real processes: the same tokens through every topology, and nothing left behind."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from afserve import LLM, SamplingParams
from afserve.comm.m2n.bank import LocalBankLink
from afserve.config import EngineConfig, ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, spec_of
from afserve.engine.scheduling.request import GenerationRequest
from afserve.errors import ConfigError, OverloadedError, RequestError
from afserve.launch.plan.models import CONFIGS
from tests.e2e.names import named
from tests.engine.driving import collect, drive
from tests.engine.test_eight_bits import RowsThroughFp8, with_rounded_experts

pytestmark = pytest.mark.process
PROMPTS = [[5, 6, 7, 8], [100, 3, 9] * 7, [11] * 40]
GREEDY = SamplingParams(max_tokens=16, temperature=0)
KEPT: set[int] = set()


@pytest.fixture(autouse=True)
def others(warm_fork_servers):
    """Children that other tests' libraries keep (multiprocessing's tracker) are not ours to end, nor is the warm
    interpreter."""
    KEPT.clear()
    KEPT.update(child.pid for child in psutil.Process().children(recursive=True))


def nodes_left() -> list[str]:
    return [name for name, child in named(psutil.Process().children(recursive=True)) if child.pid not in KEPT]


@pytest.mark.by_day(every=2)
@pytest.mark.parametrize(
    "topology",
    [
        {"attention": 1, "experts": 1, "micro_batches": 1},
        {"attention": 1, "experts": 1, "micro_batches": 2, "share_cores": True},
        {"attention": 1, "experts": 1, "micro_batches": 2, "share_cores": False},
        {"attention": 2, "experts": 3, "micro_batches": 2},
        {"attention": 1, "colocated": True},
    ],
    ids=["1x1", "1x1 with cores lent", "1x1 with no cores lent", "2x3", "colocated"],
)
def test_the_same_tokens_as_transformers(tiny_checkpoint, oracle, topology):
    import torch

    with LLM(tiny_checkpoint("v3"), threads=1, **topology) as llm:
        found = llm.generate(PROMPTS, GREEDY)
        again = llm.generate(PROMPTS, GREEDY)
    for prompt, one, other in zip(PROMPTS, found, again, strict=True):
        expected = oracle("v3").generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)[
            0, len(prompt) :
        ]
        assert list(one.token_ids) == expected.tolist() == list(other.token_ids)
        assert one.finish_reason == "length"
    assert again[2].cached_tokens > 0
    assert nodes_left() == []


def test_the_checkpoint_s_own_layer_drafts_over_expert_nodes():
    """Every node loads it, as all are told of it: the placement has its experts."""
    asked = ["import os\n", "class Reader:\n    def __init__(self", "def main"]
    found = []
    for drafts in ({}, {"draft": "mtp:2"}):
        with LLM("nano", attention=2, experts=2, threads=1, **drafts) as llm:
            assert len(llm.topology.deployment.placement.layers) == 4 + len(drafts)
            answers = llm.generate(
                asked, SamplingParams(max_tokens=40, temperature=0, return_routed_experts=True)
            )
            found.append([(one.token_ids, one.routed_experts) for one in answers])
            for one in answers:
                assert one.routed_experts is not None
                assert one.routed_experts.shape == (len(one.prompt_ids) + len(one.token_ids) - 1, 4, 4)
    assert found[0] == found[1]


def check_small(llm):
    need = {"attention-0": llm.topology.attention, "expert-0": llm.topology.expert}
    pids = llm.run.processes.pids
    for name, node in need.items():
        assert psutil.Process(pids[name]).memory_info().rss < node.weights + node.kv + (450 << 20), name


def test_texts_choices_and_stops_of_nodes_that_stay_small():
    with LLM("nano", attention=1, experts=2, threads=1) as llm:
        seeded = SamplingParams(max_tokens=8, temperature=0.8, seed=3, n=3)
        first, second = llm.generate("def main", seeded), llm.generate(["def main"], seeded)
        assert [one.token_ids for one in first] == [one.token_ids for one in second]
        assert [one.index for one in first] == [0, 1, 2] and len({one.token_ids for one in first}) > 1
        whole = llm.generate("import os\n", SamplingParams(max_tokens=12, temperature=0))[0]
        stop = whole.text[4:7]
        cut = llm.generate("import os\n", SamplingParams(max_tokens=12, temperature=0, stop=(stop,)))[0]
        assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(stop)]
        with pytest.raises(RequestError, match=str(llm.topology.deployment.engine.max_model_len)):
            llm.generate([[1] * 5000])
        assert llm.generate("x", GREEDY)[0].text  # the refusal harmed nobody
        check_small(llm)
    assert nodes_left() == []
    with pytest.raises(ConfigError, match="not started"):
        llm.generate("x")


def test_int8_experts_over_processes(tiny_checkpoint, tmp_path):
    """The tokens of a checkpoint whose experts were rounded to what int8 holds."""
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    rounded = with_rounded_experts(tiny_checkpoint("v3"), tmp_path / "rounded")
    found = []
    for model, kept in ((rounded.path, "auto"), (tiny_checkpoint("v3"), "int8")):
        with LLM(model, attention=1, experts=2, threads=1, expert_dtype=kept) as llm:
            found.append([one.token_ids for one in llm.generate(PROMPTS, GREEDY)])
            assert llm.topology.deployment.engine.expert_dtype == kept
    assert found[0] == found[1]
    assert nodes_left() == []


def test_rows_in_fp8_over_processes():
    """nano keeps its senses: what it writes is what it writes with rows that were rounded the same way."""
    source = ModelSource(str(CONFIGS / "nano"), "nano")
    spec = spec_of(source)
    held = [(layer, e, e) for layer in range(spec.moe_layers) for e in range(spec.experts)]
    link = LocalBankLink(RowsThroughFp8(build_expert_bank(source, held, spec.experts)))
    node = build_attention_node(source, EngineConfig(200, 64, micro_batches=1), link)
    greedy = replace(GREEDY, ignore_eos=True)
    wanted = collect(drive(node, [GenerationRequest(i, tuple(p), greedy) for i, p in enumerate(PROMPTS)]))
    with LLM("nano", attention=1, experts=2, threads=1, wire_dtype="fp8") as llm:
        assert [list(one.token_ids) for one in llm.generate(PROMPTS, greedy)] == wanted
        assert "return" in llm.generate("def main():", SamplingParams(max_tokens=16, temperature=0))[0].text


def test_a_cache_in_8_bits_gives_the_same_tokens_in_any_topology():
    """Also where prompts are handed over, and where blocks come from another node or from host memory."""
    topologies = (
        {"colocated": True, "kv_host": "16MiB"},
        {"attention": 2, "experts": 3, "micro_batches": 2, "kv_copies": 1},
        {"prefill": 1, "decode": 1, "experts": 1, "straight_tokens": 0},
    )
    prompts = [*PROMPTS, list(range(20, 120))]
    found = []
    for topology in topologies:
        with LLM("nano", threads=1, kv_dtype="int8", **topology) as llm:
            for _ in range(2):
                found.append([one.token_ids for one in llm.generate(prompts, GREEDY)])
    assert all(each == found[0] for each in found)
    assert nodes_left() == []


def test_settings_of_the_cache_and_the_queue():
    """Two prompts have room, and are continued until the cache is full; one waits, and who comes then is refused."""
    small = {"kv_tokens": 2048, "block_size": 32, "prefix_caching": False, "max_waiting": 1}
    with LLM("nano", colocated=True, threads=1, **small) as llm:
        again = [llm.generate(PROMPTS[2], GREEDY)[0].cached_tokens for _ in range(2)]
        assert again == [0, 0]
        with pytest.raises(OverloadedError, match="1 requests are waiting, the limit is 1"):
            llm.generate([[11] * 700], replace(GREEDY, n=16, max_tokens=1300, ignore_eos=True))


def test_a_lost_node_is_made_up_for():
    copies = {"expert_copies": 2, "spare_slots": 0, "silence": 2.0, "rebalance": "auto"}
    with LLM("nano", attention=1, experts=2, threads=1, **copies) as llm:
        rules = llm.run.controller.balancing._rules
        assert rules.act and rules.copies == 2 and llm.topology.deployment.silence == 2.0
        expected = llm.generate(PROMPTS, GREEDY)
        for name in ("expert-1", "attention-0"):
            os.kill(llm.run.processes.pids[name], signal.SIGKILL)
            assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY)] == [o.token_ids for o in expected]
    assert nodes_left() == []


def test_a_start_that_fails_leaves_nothing(tmp_path: Path):
    with pytest.raises(ConfigError, match="no-such-model"):
        LLM("no-such-model").start()
    assert nodes_left() == []
