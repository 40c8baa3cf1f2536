"""INT4 checkpoints of random weights: what is written is what a reader finds, and a published shape has its size."""

import json
from dataclasses import replace

import pytest
from safetensors import safe_open

from afserve.config import ModelSource
from afserve.engine.build import build_expert_bank, spec_of
from bench import make_checkpoint, make_int4_checkpoint
from tests.engine.driving import collect, config, prompts, requests
from tests.engine.local_cluster import LocalCluster

SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 128,
    "vocab_size": 320,
    "num_experts": 12,
}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    text = make_checkpoint.corpus.Document(
        "heapq.py", "def heappush(heap, item):\n    heap.append(item)\n" * 40
    )
    monkeypatch.setattr(make_checkpoint.corpus, "documents", lambda: [text])
    shape = make_int4_checkpoint.SHAPES["qwen3-30b-a3b"]
    written = make_int4_checkpoint.write(replace(shape, config=shape.config | SMALL), tmp_path)
    assert (
        written
        == json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    )
    return tmp_path


@pytest.mark.slow
def test_it_serves_and_experts_stay_in_4_bits(folder):
    source = ModelSource(str(folder), "int4")
    spec = spec_of(source)
    bank = build_expert_bank(source, [(0, 0, 3)], 1)
    assert spec.layers == 2 and bank.rounding_error is None
    assert bank.expert_bytes < spec.expert_parameters()
    cluster = LocalCluster.build(source, config(), attention=1, experts=2)
    assert {len(tokens) for tokens in collect(cluster.run(requests(prompts(vocab=320))))} == {64}


def test_a_file_for_every_layer_and_a_seed_repeats(folder, tmp_path_factory):
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    held = {file: set(safe_open(str(folder / file), "pt").keys()) for file in set(index.values())}
    assert sorted(held) == [f"model-{number:05d}.safetensors" for number in range(4)]
    assert index == {name: file for file, names in held.items() for name in names}
    assert all(name.startswith("model.layers.1.") for name in held["model-00003.safetensors"])
    again = tmp_path_factory.mktemp("again")
    shape = make_int4_checkpoint.SHAPES["qwen3-30b-a3b"]
    make_int4_checkpoint.write(replace(shape, config=shape.config | SMALL), again)
    for file in held:
        assert (again / file).read_bytes() == (folder / file).read_bytes()


def test_the_published_shape_takes_17_gib():
    """Counted from names and sizes: nothing is written."""
    shape, total = make_int4_checkpoint.SHAPES["qwen3-30b-a3b"], 0.0
    for name, size in shape.sizes(shape.config):
        numbers = size[0] * (size[1] if len(size) > 1 else 1)
        total += numbers * (0.5 + 2 / make_int4_checkpoint.GROUP if ".experts." in name else 2)
    assert 16.5 < total / 2**30 < 17.5
