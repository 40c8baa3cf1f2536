"""docs/add-a-family.md, followed: one file and one row, and a new family is served, planned and right."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from afserve.cli.plan.catalog import load_model
from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.errors import CheckpointError
from afserve.families import table
from afserve.spec import ModelSpec
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster

PAGE = Path(__file__).parents[2] / "docs/add-a-family.md"
MOST_LINES = 40
SIZES = {
    "model_type": "toy_moe", "vocab_size": 211, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "max_position_embeddings": 256,
}  # fmt: skip
NARROW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Lines of code that the page needs, once its file is loaded and its row is in the table."""
    page = PAGE.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (name,) = re.findall(r'^    "(\w+)": \1\.FAMILY,$', page, re.MULTILINE)
    path = tmp_path / f"{name}.py"
    path.write_text(code)
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    monkeypatch.setitem(table.FAMILIES, name, module.FAMILY)
    return sum(1 for line in code.splitlines() if line.strip()) + 1


def folder_of(path: Path, **fields) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**SIZES, **fields}))
    return path


def tokens(folder, load_format="dummy", topology=()):
    source, asked = ModelSource(str(folder), "toy", load_format=load_format), requests(prompts())
    if not topology:
        return collect(drive(colocated(source, config()), asked))
    attention, experts = topology
    cluster = LocalCluster.build(source, config(micro_batches=2), attention=attention, experts=experts)
    return collect(cluster.run(asked))


@pytest.mark.slow
def test_one_file_and_one_row(toy, tmp_path, capsys):
    assert toy <= MOST_LINES
    folder = folder_of(tmp_path / "dummy", **NARROW)
    alone = tokens(folder)
    assert tokens(folder, topology=(2, 3)) == alone
    assert tokens(folder_of(tmp_path / "full")) != alone  # the window is that of its layers
    with capsys.disabled():
        print(f"\na new family: {toy} lines, one file and one row")


@pytest.mark.slow
def test_no_step_asks_for_the_spec_of_a_layer(tiny_checkpoint, monkeypatch):
    """What a layer is was decided at load; decoding reads what was loaded."""
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    cluster = LocalCluster.build(source, config(), attention=1, experts=2)

    def asked(*_):
        raise AssertionError("a step asked the spec for a layer")

    for name in ("layer", "moe", "moe_layer_ids", "moe_index"):
        monkeypatch.setattr(ModelSpec, name, property(asked) if name != "layer" else asked)
    assert collect(cluster.run(requests(prompts())))


@pytest.mark.slow
def test_its_tokens_are_those_of_the_same_model_under_other_names(toy, tmp_path, tiny_checkpoint, expected):
    folder, renamed = folder_of(tmp_path / "weights"), {}
    names = {"gate.weight": "router.weight", "w1": "w_gate", "w2": "w_down", "w3": "w_up"}
    for name, tensor in load_file(tiny_checkpoint("mixtral") / "model.safetensors").items():
        stem, inside, rest = name.partition(".block_sparse_moe.")
        for old, new in names.items() if inside else ():
            rest = re.sub(rf"(^|\.){old}($|\.)", rf"\g<1>{new}\g<2>", rest)
        renamed[f"{stem}.feed_forward.{rest}" if inside else name] = tensor
    save_file(renamed, folder / "model.safetensors")
    for topology in ((), (1, 2)):
        assert tokens(folder, "safetensors", topology) == expected("mixtral")


def test_it_is_planned_for(toy, tmp_path):
    shape = load_model(str(folder_of(tmp_path / "shape", **NARROW)))
    assert [(group.kind, group.layers) for group in shape.attention] == [("gqa", 1), ("window", 2)]


def test_what_no_kernel_runs_is_refused(toy, tmp_path):
    folder = folder_of(tmp_path / "odd", hidden_act="relu")
    with pytest.raises(
        CheckpointError,
        match=r"hidden_act: 'relu' is not supported; supported: silu, gelu_pytorch_tanh, relu2 \(layer",
    ):
        tokens(folder)


@pytest.mark.parametrize("types", [["full_attention"] * 2, ["full_attention", "linear_attention", "x"]])
def test_layers_that_are_not_named(toy, tmp_path, types):
    with pytest.raises(
        CheckpointError, match=r"layer_types: .* is not one of full_attention, sliding_attention for each"
    ):
        tokens(folder_of(tmp_path / "odd", layer_types=types))


def test_the_family_is_unknown_without_its_row(tmp_path):
    with pytest.raises(CheckpointError, match="model_type 'toy_moe' is not supported"):
        tokens(folder_of(tmp_path / "early"))
