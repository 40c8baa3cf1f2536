"""Dense weights in int8 or int4 through whole clusters: the tokens of a model rounded the same way."""

import json
import shutil
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from afserve.comm.m2n.link_contract import Link
from afserve.comm.m2n.ticket import Ticket
from afserve.config import ModelSource
from afserve.engine.build import build_attention_node, colocated, dtype_of, spec_of, tensors_of
from afserve.errors import ConfigError
from afserve.families.table import naming_of
from afserve.kernels.grouped import int4_rounded, int8_rounded
from afserve.kernels.ops import open_ops
from afserve.models.decoder import AttentionModel
from tests.engine.driving import BRIEF, FAMILIES, collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster

WHOLE = (
    "norm",
    "embed",
    "mlp.gate.weight",
    "gate.e_score",
    ".experts.",
    "block_sparse_moe",
    "shared_expert_gate",
    "conv1d",
    "A_log",
    "dt_bias",
    ".bias",
)
NO_LINK = cast(Link[Ticket], None)  # what is refused is refused before one is asked for
ROUNDED = {"int8": int8_rounded, "int4": int4_rounded}


def with_rounded_maps(folder: Path, to: Path, kept: str) -> ModelSource:
    """The checkpoint with the values that dense maps have in few bits, in its own dtype."""
    spec, tensors, rounded = (
        spec_of(ModelSource(str(folder), "m")),
        load_file(folder / "model.safetensors"),
        ROUNDED[kept],
    )
    for name, weight in tensors.items():
        if any(part in name for part in WHOLE):
            continue
        if name.endswith("kv_b_proj.weight"):
            a = spec.layer(0).attention
            tensors[name] = by_head(weight, a.heads, a.nope_dim, rounded)
        else:
            tensors[name] = rounded(weight).to(weight.dtype)
    shutil.copytree(folder, to)
    if spec.tied:  # the head is rounded, the embeddings are not
        tensors["lm_head.weight"] = rounded(tensors["model.embed_tokens.weight"])
        read = json.loads((to / "config.json").read_text())
        (to / "config.json").write_text(json.dumps(read | {"tie_word_embeddings": False}))
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return ModelSource(str(to), "rounded")


def by_head(weight: Tensor, heads: int, nope: int, rounded) -> Tensor:
    """What meets the query is kept transposed, so its scales belong to other numbers."""
    each = weight.view(heads, -1, weight.shape[1])
    made = [torch.cat((rounded(head[:nope].t()).t(), rounded(head[nope:]))) for head in each]
    return torch.stack(made).view(weight.shape).to(weight.dtype).contiguous()


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kept", ["int8", "int4"])
def test_dense_bits_give_the_tokens_of_rounded_weights(name, kept, tiny_checkpoint, tmp_path, caplog):
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    source, asked = ModelSource(str(tiny_checkpoint(name)), name), requests(prompts(), BRIEF)
    rounded = with_rounded_maps(tiny_checkpoint(name), tmp_path / "rounded", kept)
    wanted = collect(drive(colocated(rounded, config()), asked))
    few = config(dense_dtype=kept)
    assert collect(LocalCluster.build(source, few, attention=1, experts=2).run(asked)) == wanted
    assert collect(drive(colocated(source, few), asked)) == wanted
    assert f"dense weights are rounded to {kept}" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kept", ["int8", "int4"])
def test_topologies_agree_with_everything_in_few_bits(dtype, kept, tiny_checkpoint):
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    source = ModelSource(str(tiny_checkpoint("v3")), "v3", dtype=dtype)
    asked, few = requests(prompts(), BRIEF), config(dense_dtype=kept, expert_dtype=kept)
    wanted = collect(drive(colocated(source, few), asked))
    two = config(dense_dtype=kept, expert_dtype=kept, micro_batches=2, max_batch_tokens=24)
    for attention, experts in ((1, 1), (2, 3)):
        cluster = LocalCluster.build(source, two, attention=attention, experts=experts)
        assert collect(cluster.run(asked)) == wanted


@pytest.mark.slow
def test_the_error_is_measured(tiny_checkpoint):
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    spec, found = spec_of(source), {}
    for kept in ("auto", "int8", "int4"):
        ops = open_ops()
        loaded = AttentionModel(
            spec, tensors_of(source, spec, ops.device), naming_of(spec), ops, dtype_of(source, spec), 64,
            dense_dtype=kept,
        )  # fmt: skip
        found[kept] = loaded.rounding_error
    eight, four = found["int8"], found["int4"]
    assert found["auto"] is None and eight is not None and four is not None
    assert 0 < eight < 0.02 < four < 0.12


@pytest.mark.parametrize("kept", ["int8", "int4"])
def test_few_bits_are_refused_where_nothing_keeps_them(kept, tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "m")
    said = rf"dense_dtype: {kept} needs the native CPU library.* here are the torch kernels and torch.float32"
    with pytest.raises(ConfigError, match=said):
        build_attention_node(source, config(dense_dtype=kept), NO_LINK, ops=open_ops("cpu", backend="torch"))
    half = ModelSource(source.path, "m", dtype="float16")
    with pytest.raises(ConfigError, match=rf"dense_dtype: {kept} .* and torch.float16"):
        build_attention_node(half, config(dense_dtype=kept), NO_LINK)
