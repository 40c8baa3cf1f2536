"""Random checkpoints: transformers finds exactly the tensors it expects, in one file or several."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

from bench import make_checkpoint

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "moe_intermediate_size": 16, "vocab_size": 320}
SMALL |= {"full_attention_interval": 2, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def short_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    text = make_checkpoint.corpus.Document("heapq.py", Path(make_checkpoint.__file__).read_text())
    monkeypatch.setattr(make_checkpoint.corpus, "documents", lambda: [text])


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", sorted(make_checkpoint.SHAPES))
def test_transformers_loads_it_and_logits_have_a_sensible_scale(
    tmp_path: Path, name: str, shards: int
) -> None:
    shape = make_checkpoint.SHAPES[name]
    kinds = {"layer_types": shape.config["layer_types"][:2]} if "layer_types" in shape.config else {}
    count = make_checkpoint.write(
        replace(shape, config=shape.config | SMALL | kinds), tmp_path, shards=shards
    )
    few = (
        {"quantization_config": Mxfp4Config(dequantize=True)} if "quantization_config" in shape.config else {}
    )
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True, **few
    )
    assert not any(info.values()), info
    assert sum(p.numel() for p in model.parameters()) <= count
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("def push(heap):", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert 0.3 < model(ids).logits.std() < 3.0
    assert len(tokenizer) == 320


@pytest.mark.parametrize("name", sorted(make_checkpoint.SHAPES))
def test_measured_shapes_have_as_many_parameters_as_their_names_say(name: str) -> None:
    shape = make_checkpoint.SHAPES[name]
    count = sum(make_checkpoint.parameters(tensor, size) for tensor, size in shape.sizes(shape.config))
    said = f"{round(count / 1e6)}m" if count < 1e9 else f"{round(count / 1e9)}b"
    assert name.endswith(f"-{said}")


@pytest.mark.slow
def test_a_seed_repeats(tmp_path: Path) -> None:
    shape = make_checkpoint.SHAPES["deepseek-v3-119m"]
    shape = replace(shape, config=shape.config | SMALL)
    first, again = (dict(make_checkpoint.tensors(shape, seed=3)) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    make_checkpoint.write(shape, tmp_path, shards=2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(first)
