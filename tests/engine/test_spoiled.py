"""Checkpoints that hold a NaN or an infinity: requests that meet it end, the layer is named, all others are exact."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import NO_EXPERTS, NOT_FINITE, GenerationRequest, SamplingParams
from afserve.engine.step.spoiled import Spoiled
from tests.engine.driving import config, prompts
from tests.engine.local_cluster import LocalCluster

BAD = [math.nan, math.inf, -math.inf]
HEAD = "the final norm or the LM head"
# what is spoiled -> where it is noticed; MoE layers of "v3" are 1 and 2
EVERYWHERE = {
    "model.layers.0.input_layernorm.weight": "layer 0",
    "model.layers.1.input_layernorm.weight": "layer 1",
    "model.layers.2.post_attention_layernorm.weight": "layer 2",
    "model.layers.0.mlp.down_proj.weight": "layer 0",
    "model.layers.1.mlp.gate.weight": "layer 1",
    "model.layers.1.mlp.shared_experts.up_proj.weight": "layer 1",
    "model.layers.2.self_attn.o_proj.weight": "layer 2",
    "model.layers.1.self_attn.kv_b_proj.weight": "layer 1",
    "model.norm.weight": HEAD,
    "lm_head.weight": HEAD,
}


@pytest.fixture
def spoil(tiny_checkpoint, tmp_path):
    """A copy of a tiny checkpoint with one value of one tensor replaced."""

    def make(name, tensor, value, row=0):
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny_checkpoint(name), folder)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        spoiled = tensors[tensor].clone()
        spoiled[row] = value
        save_file({**tensors, tensor: spoiled}, file, metadata={"format": "pt"})
        return ModelSource(str(folder), name)

    return make


def requests(count=4, tokens=5, lengths=(3, 9, 14, 21), **params):
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, **params)
    return [GenerationRequest(i, p, sampling) for i, p in enumerate(prompts(lengths[:count]))]


def outcomes(source, asked, experts=2, cluster=None, **fields):
    """Per request: its tokens, and its error if it ended with one. Every one ends exactly once."""
    cluster = cluster or LocalCluster.build(source, config(**fields), experts=experts)
    tokens: dict[int, list[int]] = {}
    errors, ended = {}, []
    for event in cluster.run(asked):
        tokens.setdefault(event.handle, []).extend(event.token_ids)
        if event.finish_reason is not None:
            ended.append(event.handle)
            assert (event.error is not None) == (event.finish_reason == "error")
            errors[event.handle] = event.error
    assert sorted(ended) == sorted(request.handle for request in asked)
    for node in cluster.attention:
        node.check()
        assert node.stats().kv_blocks_used == 0
    return {name: (tokens[name], errors[name]) for name in tokens}


@pytest.fixture(scope="module")
def clean(tiny_checkpoint):
    return outcomes(ModelSource(str(tiny_checkpoint("v3")), "v3"), requests())


@pytest.mark.by_day(1)
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("tensor", sorted(EVERYWHERE))
def test_what_every_row_meets_ends_every_request_and_no_node(spoil, tensor, value):
    for tokens, error in outcomes(spoil("v3", tensor, value), requests()).values():
        assert tokens == []
        assert error.startswith(EVERYWHERE[tensor] + " gave values that are not finite")


def test_a_selection_bias_of_infinity_selects_and_of_nan_ends(spoil):
    """It is added for the choice only: with infinity an expert is always chosen or never, and all values are finite."""
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    for _, error in outcomes(spoil("v3", bias, math.nan), requests()).values():
        assert error.startswith("layer 2")
    for value in (math.inf, -math.inf):
        assert all(error is None for _, error in outcomes(spoil("v3", bias, value), requests()).values())


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(("model", "layer"), [("v3", 2), ("late", 1)])
def test_one_expert_ends_the_requests_that_meet_it(
    spoil, tiny_checkpoint, value, micro_batches, model, layer
):
    """Whoever does not choose it has the tokens of the whole checkpoint, to the last."""
    seen, clean = set(), outcomes(ModelSource(str(tiny_checkpoint(model)), model), requests())
    for expert in range(0, 10, 2):
        source = spoil(model, f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", value)
        for name, (tokens, error) in outcomes(source, requests(), micro_batches=micro_batches).items():
            seen.add(error is None)
            if error is None:
                assert tokens == clean[name][0]
            else:
                assert error.startswith("layer 2 gave values that are not finite")
                assert tokens == clean[name][0][: len(tokens)], "what came before was right"
    assert seen == {True, False}, "the test met no expert, or every one"


def test_one_token_ends_the_requests_that_hold_it_and_its_blocks_hurt_nobody(spoil, clean):
    """A pool that holds little more than one request: blocks of those that ended are used again at once."""
    asked = requests()
    token = asked[3].prompt_ids[5]
    assert all(token not in request.prompt_ids for request in asked[:3])
    source = spoil("v3", "model.embed_tokens.weight", math.nan, row=token)
    cluster = LocalCluster.build(source, config(kv_blocks=4, max_batch_tokens=7), experts=2)
    for _ in range(3):
        got = outcomes(source, [asked[3]], cluster=cluster)
        assert got[3][1].startswith("layer 0 gave values")
        for request in asked[:3]:
            assert outcomes(source, [request], cluster=cluster) == {request.handle: clean[request.handle]}


@pytest.mark.by_day(every=2)
@pytest.mark.parametrize("name", ["v3", "qwen3", "mixtral", "qwen3-next", "late"])
def test_beside_one_that_ends_the_others_keep_their_bits(name, spoil, tiny_checkpoint):
    """In one batch with it, over prefill chunks, prefix hits and preemption, with log-probabilities."""
    asked = requests(logprobs=2)
    token = asked[3].prompt_ids[20]
    source = spoil(name, "model.embed_tokens.weight", math.inf, row=token)
    whole = ModelSource(str(tiny_checkpoint(name)), name)
    tight = {"kv_blocks": 9, "max_batch_tokens": 11, "micro_batches": 2}
    good = [request for request in asked if token not in request.prompt_ids]
    expected = outcomes(whole, good, **tight)
    got = outcomes(source, asked, **tight)
    for request in good:
        if token not in expected[request.handle][0]:
            assert got[request.handle] == expected[request.handle]
    assert got[3][1].startswith("layer 0")


def test_colocated_too(spoil, clean):
    source = spoil("v3", "model.layers.1.mlp.experts.3.gate_proj.weight", math.nan)
    node = colocated(source, config())
    for request in requests():
        node.submit(request)
    events = []
    while node.busy:
        events += node.step()
    failed = {event.handle for event in events if event.finish_reason == "error"}
    for handle in set(clean) - failed:
        assert [t for e in events if e.handle == handle for t in e.token_ids] == clean[handle][0]


@pytest.mark.parametrize("params", [{"temperature": 1.0, "seed": 3}, {"prompt_logprobs": 2}, {"logprobs": 5}])
def test_a_spoiled_head_ends_sampled_and_scored_requests_too(spoil, params):
    source = spoil("v3", "lm_head.weight", math.nan, row=17)
    sampling = SamplingParams(max_tokens=3, **{"temperature": 0.0, **params})
    asked = [GenerationRequest(0, prompts()[0], sampling), GenerationRequest(1, prompts()[1], sampling)]
    for tokens, error in outcomes(source, asked).values():
        assert tokens == [] and error.startswith(HEAD)


def test_what_a_cancelled_request_spoiled_is_cleared_as_well(spoil, clean):
    asked = requests()
    token = asked[3].prompt_ids[0]
    assert token not in asked[0].prompt_ids
    source = spoil("v3", "model.embed_tokens.weight", math.nan, row=token)
    cluster = LocalCluster.build(source, config(kv_blocks=4), experts=2)
    cluster.submit(asked[3])
    cluster.attention[0].step()
    cluster.attention[0].cancel(3)
    reasons = [e.finish_reason for _ in range(50) for e in cluster.step() if e.finish_reason]
    assert reasons == ["cancelled"]
    assert outcomes(source, [asked[0]], cluster=cluster) == {0: clean[0]}


def test_torch_agrees_that_the_tiny_checkpoint_is_finite(tiny_checkpoint):
    for tensor in load_file(tiny_checkpoint("v3") / "model.safetensors").values():
        assert torch.isfinite(tensor).all()


def test_rows_that_nobody_reads_are_looked_at_for_what_they_left_in_the_cache():
    """The step goes on with row 2 alone, behind attention of the last layer that spoiled row 1."""
    marks = Spoiled(8, torch.device("cpu"))
    starts = 0, 2, 4  # of two chunks
    normed_TH = torch.ones(4, 5)
    normed_TH[1, 3] = math.nan
    assert marks.of(starts).tolist() == [-1] * 4
    assert marks.only([3], normed_TH, 6, {0: "layers so far"}).tolist() == [-1]
    assert marks.failures() == {0: NOT_FINITE.format(where="layer 6")}
    marks.of(starts)
    marks.only([3], torch.ones(4, 5), 6, {})[0] = 6
    found = marks.failures(lambda: {0: "no replica"})
    assert found == {1: NO_EXPERTS.format(where="layer 6", why="no replica")}, (
        "rows count from those that went on"
    )
    assert marks.of(starts).tolist() == [-1] * 4 and not marks.failures()
