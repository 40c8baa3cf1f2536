"""A colocated step as one native call: tokens, counts and sums of the same model layer by layer, and who has no such
call."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.comm.m2n.bank import Bank, LocalBankLink
from afserve.config import ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, colocated, spec_of
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.kernels.ops import Ops
from afserve.tracing.trace import AWAY, Trace
from tests.engine.driving import BRIEF, collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster

native_stack = pytest.importorskip("afserve.kernels.native_stack", reason="the native library was not built")
STACKED = (
    "v3", "dsa", "v3-yarn-noq", "v3-tied-half", "v2-groups", "qwen3", "mixtral-window", "gptoss",
    "qwen2", "gemma4", "cohere2", "laguna", "ling", "lfm2", "granite4", "nemotron-odd",
)  # fmt: skip
KEPT = [("auto", "auto"), ("int8", "auto"), ("int4", "auto"), ("int8", "int8"), ("int4", "int4")]


@pytest.fixture
def calls(monkeypatch):
    """Rows of every step that was one call."""
    rows, run, decode = [], Ops.run_stack, native_stack.NativeDecoder.decode_tokens

    def noted(ops, stack, x_TH, *rest):
        rows.append(len(x_TH))
        return run(ops, stack, x_TH, *rest)

    def decoded(decoder, token_S, *rest):
        rows.append(len(token_S))
        return decode(decoder, token_S, *rest)

    monkeypatch.setattr(Ops, "run_stack", noted)
    monkeypatch.setattr(native_stack.NativeDecoder, "decode_tokens", decoded)
    return rows


def seen(node, asked, *, traced):
    """Tokens, what was counted of the way there, and how often a layer was in a trace."""
    node.trace = Trace("attention-0") if traced else None
    tokens, stats, routed = collect(drive(node, asked)), node.stats(), node.take_routed()
    drawn = 0 if node.trace is None else sum(row.endswith(AWAY) for row, *_ in node.trace.slices)
    counted = stats.steps, stats.dispatches, routed.decode_LE.tolist(), routed.prefill_LE.tolist()
    return tokens, counted, stats.under_way_seconds > 0, drawn


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("expert_dtype", "dense_dtype"), KEPT)
@pytest.mark.parametrize("name", STACKED)
def test_steps_in_one_call_are_those_layer_by_layer(name, expert_dtype, dense_dtype, dtype, folder_of, calls):
    source = ModelSource(str(folder_of(name)), name, dtype=dtype)
    settings = config(expert_dtype=expert_dtype, dense_dtype=dense_dtype)
    once = seen(colocated(source, settings), requests(prompts(), BRIEF), traced=False)
    assert calls and max(calls) == 3, "no step was one call"
    stacked = len(calls)
    wanted = seen(colocated(source, settings), requests(prompts(), BRIEF), traced=True)
    assert len(calls) == stacked, "a trace wants to see every layer"
    assert once[:3] == wanted[:3]
    assert wanted[3] == wanted[1][1] and not once[3], "what is drawn is a dispatch"


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    new=st.integers(1, 12),
    rows=st.integers(4, 40),
    micro_batches=st.integers(1, 2),
    logprobs=st.booleans(),
    name=st.sampled_from(["v3", "qwen3"]),
)
@settings(max_examples=15)
def test_any_requests(tiny_checkpoint, lengths, new, rows, micro_batches, logprobs, name):
    """Prompts in pieces beside decoding, and prompts all of whose rows are read."""
    source = ModelSource(str(tiny_checkpoint(name)), name, dtype="bfloat16")
    engine = config(max_batch_tokens=rows, micro_batches=micro_batches)
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    scored = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    asked = [
        GenerationRequest(i, prompt, scored if logprobs and i % 2 else params)
        for i, prompt in enumerate(prompts(lengths))
    ]
    once, wanted = (seen(colocated(source, engine), asked, traced=traced) for traced in (False, True))
    assert once[:3] == wanted[:3]


class Wrapped(Bank):
    """A bank that does something of its own with rows."""

    def __init__(self, bank):
        self._bank = bank

    def forward(self, *arguments):
        self._bank.forward(*arguments)


def test_a_bank_that_wants_to_be_asked_is_asked(tiny_checkpoint, calls):
    source, asked = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3"), requests(prompts(), BRIEF)
    spec = spec_of(source)
    held = [(layer, e, e) for layer in range(spec.moe_layers) for e in range(spec.experts)]
    link = LocalBankLink(Wrapped(build_expert_bank(source, held, spec.experts)))
    tokens = collect(drive(build_attention_node(source, config(), link), asked))
    assert not calls
    assert tokens == collect(drive(colocated(source, config()), asked)) and calls


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama4", "minimax-m3", "longcat"])
def test_families_with_other_steps_go_layer_by_layer(name, folder_of, calls):
    """Chunks, chosen blocks, and sums that are added later are no part of the one call."""
    source, asked = ModelSource(str(folder_of(name)), name), requests(prompts((5, 17)))
    fields = {"block_size": 16} if name == "llama4" else {}
    tokens = collect(drive(colocated(source, config(**fields)), asked))
    assert not calls
    assert collect(LocalCluster.build(source, config(**fields), experts=2).run(asked)) == tokens


@pytest.mark.slow
def test_other_backends_and_dtypes_go_layer_by_layer(tiny_checkpoint, calls):
    source = ModelSource(str(tiny_checkpoint("v3")), "v3", dtype="float16")
    assert collect(drive(colocated(source, config()), requests(prompts())))
    assert not calls
