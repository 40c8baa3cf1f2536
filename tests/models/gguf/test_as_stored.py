"""Files in Q8_0, and as llama.cpp mixes them for Q4_K_M: experts and other maps are multiplied as they are stored, take
the memory of the file, and give the same tokens in any topology."""

import pytest
import torch

from afserve.config import ModelSource
from afserve.engine.build import build_expert_bank, colocated, spec_of
from afserve.engine.scheduling.request import SamplingParams
from afserve.kernels.isa import isas_here
from afserve.kernels.native_ggml import NativeGgml
from afserve.models.blocks import dequantised
from afserve.models.gguf.folder import unfold
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.kernels.test_ggml import usual
from tests.models.gguf.conftest import build
from tests.models.gguf.writing import convert, stored

pytestmark = pytest.mark.skipif(not isas_here(), reason="the native library was not built")

NUMBERS = {"Q8_0": 8, "Q5_0": 6, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
WIDE = {
    "vocab_size": 256,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def as_q4_k_m(name: str) -> str:
    """What llama.cpp's mix has most of, and in places of values, down projections and the head."""
    higher = ("attn_v.", "blk.0.ffn_down_exps", "blk.2.ffn_down_exps")
    return "Q6_K" if name == "output.weight" or any(part in name for part in higher) else "Q4_K"


MIXES = {"Q8_0": lambda name: "Q8_0", "Q4_K_M": as_q4_k_m}


@pytest.fixture(
    scope="module", params=[("qwen3", "Q8_0"), ("qwen3", "Q4_K_M"), ("mixtral", "Q4_K_M")], ids=str
)
def both(request, tmp_path_factory):
    """A file of drawn blocks and the same numbers as floats, and the bytes of the first one's maps by name."""
    name, mix = request.param
    path = tmp_path_factory.mktemp("stored")
    folder = build(name, path / "hf", **(WIDE | ({"intermediate_size": 256} if name == "mixtral" else {})))
    drawn = {}

    def rows_of(key, x):
        if x.dim() < 2 or "ffn_gate_inp" in key:
            return None
        if key not in drawn:
            drawn[key] = usual(MIXES[mix](key), x.numel() // x.shape[-1], x.shape[-1], len(drawn))
        return drawn[key]

    def blocks(key, x):
        rows = rows_of(key, x)
        return (
            stored(x)
            if rows is None
            else (NUMBERS[rows.kind], tuple(x.shape), rows.bytes_RB.numpy().tobytes())
        )

    def floats(key, x):
        rows = rows_of(key, x)
        return stored(x if rows is None else dequantised(rows, torch.float32).view(x.shape))

    files = convert(folder, path / "packed.gguf", blocks), convert(folder, path / "plain.gguf", floats)
    folders = [unfold(file, path / file.stem) for file in files]
    return folders, {key: rows.bytes_RB.numel() for key, rows in drawn.items()}


def logprobs(folder, dtype):
    (prompt,) = prompts((33,))
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    (event,) = drive(
        colocated(ModelSource(str(folder), "m", dtype=dtype), config()), requests([prompt], params)
    )
    return torch.tensor([entry.logprob for entry in event.prompt_logprobs[1:]])


@pytest.mark.slow
def test_numbers_are_those_of_the_file(both):
    """In float32 nothing but the order of sums differs; rows of bfloat16 are rounded to 16 bits where bytes are
    multiplied."""
    (packed, plain), _ = both
    wanted = logprobs(plain, "float32")
    torch.testing.assert_close(logprobs(packed, "float32"), wanted, rtol=0, atol=1e-4)
    lost = (logprobs(plain, "bfloat16") - wanted).abs().mean()  # which rounds weights too
    assert (logprobs(packed, "bfloat16") - wanted).abs().mean() < 1.5 * lost


@pytest.mark.slow
def test_memory_is_that_of_the_file(both, monkeypatch):
    (packed, _), sizes = both
    source = ModelSource(str(packed), "m")
    spec = spec_of(source)
    held, pack_linear = [], NativeGgml.pack_linear

    def seen(self, *args):
        made = pack_linear(self, *args)
        held.append(made.handle.bytes)
        return made

    monkeypatch.setattr(NativeGgml, "pack_linear", seen)
    colocated(source, config())
    maps = sum(size for key, size in sizes.items() if "_exps" not in key and key != "token_embd.weight")
    assert sum(held) == maps
    embedding = spec.vocab_size * spec.hidden * spec.quantization.embedding_bits / 8
    assert embedding == sizes["token_embd.weight"]
    slots = [(layer, expert, expert) for layer in range(spec.moe_layers) for expert in range(spec.experts)]
    bank = build_expert_bank(source, slots, spec.experts)
    experts = sum(size for key, size in sizes.items() if "_exps" in key)
    assert sum(layer.handle.bytes for layer in bank.packed) == experts
    assert spec.routed_parameters() * spec.quantization.expert_bits / 8 == pytest.approx(experts)


@pytest.mark.slow
def test_tokens_are_the_same_in_any_topology(both):
    (packed, _), _ = both
    source = ModelSource(str(packed), "m")
    asked = requests(prompts(), GREEDY)
    wanted = collect(drive(colocated(source, config()), asked))
    cluster = LocalCluster.build(source, config(micro_batches=2, max_batch_tokens=12), attention=2, experts=3)
    assert collect(cluster.run(requests(prompts(), GREEDY))) == wanted
