"""What the layer of multi-token prediction drafts, beside transformers' `use_mtp`, on tiny random checkpoints."""

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

NEW, WORDS = 60, 9
NEXT_NAMES = {
    "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm",
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


@pytest.mark.slow
def test_drafted_tokens_of_qwen3_next_are_those_of_its_layer(tmp_path, monkeypatch):
    """transformers does not generate with it: its decoder layer and norms, over all rows of what was answered."""
    kind, folder = "Qwen3Next", tmp_path / "next"
    torch.manual_seed(5)
    settings = transformers.Qwen3NextConfig(**TINY["qwen3-next"][1] | {"vocab_size": WORDS})
    oracle = transformers.Qwen3NextForCausalLM(settings).eval()
    oracle.save_pretrained(folder)
    oracle.config.num_mtp_layers, oracle.config.mtp_layer_types = 1, ["full_attention"]
    predictor = MtpModel(oracle, 1).eval()
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for parameter in predictor.layers.parameters():
            parameter.normal_(0.0, 0.15)
    for name, tensor in predictor.layers[0].state_dict().items():
        for old, new in NEXT_NAMES.items():
            name = f"{new}.weight" if name == f"{old}.weight" else name
        tensors |= named(
            "mtp." if name.split(".")[0] in NEXT_NAMES.values() else "mtp.layers.0.", name, tensor
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found: dict[int, int] = {}
    kept = LayerDrafter.add

    def note(drafter, sequence, token, confidence):
        found.setdefault(drafter._made[sequence.order][0], token)
        kept(drafter, sequence, token, confidence)

    monkeypatch.setattr(LayerDrafter, "add", note)
    (ids,) = prompts((23,), WORDS)
    source = ModelSource(str(folder), kind)
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
