"""Whole models on the Triton backend, through the engine, give the greedy tokens that transformers gives."""

from dataclasses import replace

import pytest
import torch

from afserve.comm.m2n.bank import LocalBankLink
from afserve.config import EngineConfig, ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, spec_of
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.kernels.ops import Ops, open_ops
from afserve.kernels.triton.backend import TritonBackend
from tests.engine.local_cluster import LocalCluster
from tests.engine.phased import Phased

PROMPTS = ((5, 77, 130), (9, 8, 7, 150, 33, 21))
NEW = 3


def setup(device, **fields):
    """A small engine on the device, or in the interpreter on the CPU."""
    config = EngineConfig(
        max_model_len=32,
        kv_blocks=16,
        block_size=8,
        max_batch_tokens=5,
        micro_batches=1,
        device=str(device),
        **fields,
    )
    return config, Ops(TritonBackend(device, multiprocessors=2), device, 1)


def requests():
    greedy = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    return [GenerationRequest(number, prompt, greedy) for number, prompt in enumerate(PROMPTS)]


def check(events, model):
    got = {number: [] for number in range(len(PROMPTS))}
    for event in events:
        assert event.error is None
        got[event.handle] += event.token_ids
    with torch.no_grad():
        for number, prompt in enumerate(PROMPTS):
            out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
            assert got[number] == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "name",
    [
        "mixtral-window",
        "v2-groups",
        *(
            pytest.param(name, marks=pytest.mark.long) for name in ("qwen3", "v3")
        ),  # by day over two nodes, below
    ],
)
def test_greedy_tokens(device, name, tiny_checkpoint, oracle):
    source = ModelSource(str(tiny_checkpoint(name)), name)
    check(colocated(source, *setup(device)), oracle(name))


def colocated(source, config, ops, asked=None):
    """The events of a node with all experts."""
    spec = spec_of(source)
    held = [(layer, expert, expert) for layer in range(spec.moe_layers) for expert in range(spec.experts)]
    bank = build_expert_bank(source, held, spec.experts, ops=ops)
    node = build_attention_node(source, config, LocalBankLink(bank), ops=ops)
    for request in asked or requests():
        node.submit(request)
    events = []
    while node.busy:
        events += node.step()
    return events


@pytest.mark.parametrize(("name", "kv_dtype"), [("qwen3", "fp8"), ("v3", "int8")])
def test_greedy_tokens_over_a_cache_in_8_bits(device, fp8, name, kv_dtype, tiny_checkpoint):
    """As on a CPU, whose cache has the same codes but for roundings."""
    source = ModelSource(str(tiny_checkpoint(name)), name)
    config, ops = setup(device, kv_dtype=kv_dtype)
    found = colocated(source, config, ops)
    wanted = colocated(source, replace(config, device="cpu"), open_ops("cpu", 1, "torch"))
    assert [e.token_ids for e in found] == [e.token_ids for e in wanted] and not any(e.error for e in found)


@pytest.mark.parametrize(("name", "devices"), [("qwen3", 4), ("v3", 2)])
def test_greedy_tokens_over_two_expert_nodes(device, name, devices, tiny_checkpoint, oracle):
    """On a GPU the mailboxes are there too, so rows travel as between GPUs. Where kernels are interpreted the attention
    node has several devices, which are one processor."""
    config, ops = setup(device, tensor_parallel=devices if device.type == "cpu" else 1)
    source = ModelSource(str(tiny_checkpoint(name)), name)
    check(LocalCluster.build(source, config, experts=2, ops=ops).run(requests()), oracle(name))


@pytest.mark.skipif(torch.cuda.is_available(), reason="both backends compute on the CPU here")
@pytest.mark.parametrize(
    ("name", "kv_dtype", "decodes"), [("qwen3", "auto", 1), ("v3", "int8", 0), ("qwen3-next", "auto", 0)]
)
def test_prompts_of_one_backend_are_decoded_by_another(device, name, kv_dtype, decodes, tiny_checkpoint):
    """Triton's kernels read prompts for native ones, or the other way round: the KV that is handed over is what the
    decoding node had computed itself, so that the tokens are those of native kernels alone."""
    source = ModelSource(str(tiny_checkpoint(name)), name)
    config, triton = setup(device, kv_dtype=kv_dtype)
    native = open_ops("cpu", 1, "native")
    kinds = (triton, native) if decodes else (native, triton)
    world = Phased(LocalCluster.build(source, config, attention=2, ops=kinds, expert_ops=native), 1)
    (prefill,), (decode,) = world.prefilling, world.decoding
    asked = GenerationRequest(0, tuple(range(5, 15)), requests()[0].params)
    world.submit(asked, prefill, decode)
    world.run()
    moved = decode.moves.stats()
    assert (moved.handed, moved.handed_short) == (1, 0), world.lines
    wanted = colocated(source, config, native, [asked])
    assert world.said == {0: [token for event in wanted for token in event.token_ids]}
