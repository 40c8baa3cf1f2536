"""What the layer of multi-token prediction drafts, beside transformers' `use_mtp`, on tiny random checkpoints."""

from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.draft.layer_drafter import LayerDrafter
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from tests.conftest import DEEPSEEK, SIZES, TINY
from tests.engine.driving import collect, config, drive, prompts
from tests.engine.test_drafted_answers import PLACES, answered
from tests.families import tiny

NEW, WORDS = 60, 9
NEXT_NAMES = {
    "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm",
}  # fmt: skip
MIMO_NAMES = {
    "mtp_block.": "", "post_norm.": "final_layernorm.", "post_attention_layernorm.": "pre_mlp_layernorm.",
    "self_attn.sinks": "self_attn.attention_sink_bias",
}  # fmt: skip
KINDS = {
    "DeepseekV3": {**DEEPSEEK, "q_lora_rank": 28, "n_group": 4, "topk_group": 2, "n_shared_experts": 1},
    "Glm4Moe": {
        **SIZES, "intermediate_size": 80, "moe_intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 16,
        "n_routed_experts": 12, "num_experts_per_tok": 3, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """A model with one such layer in its folder. Of few tokens, so that drafts are right now and then."""
    kind, folder = request.param, tmp_path_factory.mktemp("mtp")
    torch.manual_seed(3)
    made = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(
            **KINDS[kind] | {"vocab_size": WORDS}, num_nextn_predict_layers=1
        )
    )
    made.save_pretrained(folder)
    layer = f"model.layers.{made.config.num_hidden_layers}."
    predictor = MtpModel(made, 1)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in predictor.layers[0].state_dict().items():
        drawn = torch.rand_like(tensor) + 0.5 if "norm" in name else torch.randn_like(tensor) * 0.15
        tensors |= named(layer, name, drawn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    cls = type(made)
    kept, cls._keys_to_ignore_on_load_unexpected = cls._keys_to_ignore_on_load_unexpected, [rf"{layer}.*"]
    loaded = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    yield loaded, ModelSource(str(folder), kind)
    cls._keys_to_ignore_on_load_unexpected = kept


def named(layer, name, tensor):
    """As checkpoints have it: experts one by one, the decoder layer's tensors beside the others."""
    name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    if name.endswith("experts.gate_up_proj"):
        halves = [both.chunk(2) for both in tensor]
        return {
            f"{layer}mlp.experts.{i}.{part}_proj.weight": half.contiguous()
            for i, both in enumerate(halves)
            for part, half in zip(("gate", "up"), both, strict=True)
        }
    if name.endswith("experts.down_proj"):
        return {f"{layer}mlp.experts.{i}.down_proj.weight": one.contiguous() for i, one in enumerate(tensor)}
    return {layer + name: tensor.contiguous()}


@pytest.mark.slow
def test_drafted_tokens_are_those_of_transformers(model, monkeypatch):
    oracle, source = model
    wanted, found = {}, {}
    told, kept = MTPCandidateGenerator.get_candidates, LayerDrafter.add

    def noted(generator, input_ids, *rest, **fields):
        ids, logits = told(generator, input_ids, *rest, **fields)
        if logits is not None:
            wanted[input_ids.shape[1]] = (int(ids[0, -1]), float(logits[0, -1].softmax(-1).max()))
        return ids, logits

    def note(drafter, sequence, token, confidence):
        found[drafter._made[sequence.order][0]] = (token, confidence)
        kept(drafter, sequence, token, confidence)

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    monkeypatch.setattr(LayerDrafter, "add", note)
    (ids,) = prompts((23,), WORDS)
    node = colocated(source, config(draft="mtp:1", max_batch_tokens=9))
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    (answer,) = collect(drive(node, [GenerationRequest(0, ids, params)]))
    with torch.no_grad():
        said = oracle.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, use_mtp=True)
    assert answer == said[0, len(ids) :].tolist()
    drafts = node.stats().drafts
    assert 0 < drafts.accepted < drafts.tokens
    assert len(found) > NEW // 2 and found.keys() <= wanted.keys()
    for length in found:
        assert found[length][0] == wanted[length][0]
        assert found[length][1] == pytest.approx(wanted[length][1], abs=1e-4)


def next_named(name, tensor):
    for old, new in NEXT_NAMES.items():
        name = f"{new}.weight" if name == f"{old}.weight" else name
    return named("mtp." if name.split(".")[0] in NEXT_NAMES.values() else "mtp.layers.0.", name, tensor)


def mimo_named(name, tensor):
    for old, new in MIMO_NAMES.items():
        name = name.replace(old, new)
    return {f"model.mtp.layers.0.{name}": tensor.contiguous()}


APART = {
    "Qwen3Next": (TINY["qwen3-next"][1], {"mtp_layer_types": ["full_attention"]}, next_named),
    "MiMoV2Flash": (
        tiny.TINY["mimo"][1],
        {"mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["dense"]},
        mimo_named,
    ),
}


@pytest.fixture(scope="module", params=APART)
def apart(request, tmp_path_factory):
    """A model whose layer of multi-token prediction has names of its own, and that layer as transformers computes
    it."""
    kind, folder = request.param, tmp_path_factory.mktemp("apart")
    fields, layers, stored_as = APART[kind]
    torch.manual_seed(5)
    settings = getattr(transformers, f"{kind}Config")(**fields | {"vocab_size": WORDS})
    oracle = getattr(transformers, f"{kind}ForCausalLM")(settings)
    oracle.set_attn_implementation("eager")
    oracle.eval().save_pretrained(folder)
    oracle.config.num_mtp_layers = 1
    for name, types in layers.items():
        setattr(oracle.config, name, types)
    predictor = MtpModel(oracle, 1).eval()
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for parameter in predictor.layers.parameters():
            parameter.normal_(0.0, 0.15)
    for name, tensor in predictor.layers[0].state_dict().items():
        tensors |= stored_as(name, tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return oracle, predictor, ModelSource(str(folder), kind)


@pytest.mark.slow
def test_drafted_tokens_are_those_of_a_layer_with_names_of_its_own(apart, monkeypatch):
    """transformers does not generate with these: their decoder layer and norms, over all rows of what was answered."""
    oracle, predictor, source = apart
    found: dict[int, int] = {}
    kept = LayerDrafter.add

    def note(drafter, sequence, token, confidence):
        found.setdefault(drafter._made[sequence.order][0], token)
        kept(drafter, sequence, token, confidence)

    monkeypatch.setattr(LayerDrafter, "add", note)
    (ids,) = prompts((23,), WORDS)
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    asked = [GenerationRequest(0, ids, params)]
    node = colocated(source, config(draft="mtp:2", max_batch_tokens=9))
    (answer,) = collect(drive(node, asked))
    assert answer == collect(drive(colocated(source, config()), asked))[0]
    assert node.stats().drafts.accepted > 0
    whole = torch.tensor([[*ids, *answer]])
    with torch.no_grad():
        last = oracle.model(whole).last_hidden_state[:, :-1]
        places = torch.arange(1, whole.shape[1])[None]
        out = predictor.forward_layer(0, last, places, None, input_ids=whole[:, 1:])
        wanted = oracle.lm_head(out)[0].argmax(-1).tolist()
    assert len(found) > NEW // 3
    assert found == {length: wanted[length - 2] for length in found}


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_all_is_told_as_without_drafts(place, apart):
    """With windows in a cache of their own, too."""
    fields: dict[str, Any] = {
        "max_tokens": 30,
        "ignore_eos": True,
        "logprobs": 1,
        "return_routed_experts": True,
    }
    asked = [
        GenerationRequest(i, ids, SamplingParams(temperature=i % 2 * 0.9, seed=i, **fields))
        for i, ids in enumerate(prompts((3, 21, 40, 9, 33, 17), WORDS))
    ]
    source = apart[2]
    windows: dict[str, Any] = {"window_blocks": 80} if apart[0].config.model_type == "mimo_v2_flash" else {}
    plain = answered(source, place, asked, max_batch_tokens=24, **windows)
    assert answered(source, place, asked, "mtp:3", max_batch_tokens=24, **windows) == plain
