"""Drafts by heads beside a model, EAGLE-3's and DFlash's: those of a plain reference, in every layout that heads have,
and answers as without."""

import json
import random
from dataclasses import fields, replace
from itertools import chain, count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from afserve.config import EngineSettings, ModelSource
from afserve.drafts import BESIDE, HEAD, DraftChoice
from afserve.engine.build import colocated
from afserve.engine.draft.block_loop import BlockLoop
from afserve.engine.draft.drafter import LAYERS
from afserve.engine.draft.layer_loop import LayerLoop
from afserve.engine.scheduling.request import SamplingParams
from afserve.engine.stats.drafts import StatsByDrafter
from afserve.engine.step.stack_runner import StackRunner
from afserve.errors import CheckpointError, ConfigError, UserError
from afserve.families.drafters.read import READERS, load_head
from afserve.families.table import load_spec
from afserve.launch.plan.drafting import planned_spec
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Wishes
from afserve.models.drafters.dspark import DsparkHead
from afserve.placement.planner.perf.drafting import DRAFTERS
from afserve.speculative_config import choice_of
from tests.conftest import TINY
from tests.engine.driving import GREEDY, collect, config, drive, prompts, requests
from tests.engine.heads import (
    BLOCK,
    FORMS,
    GROUPS,
    LAYER,
    METHOD,
    QWEN,
    SIZE,
    VOCAB,
    Reference,
    check,
    guesses_of,
    head_in,
    tensors_of,
)
from tests.engine.local_cluster import LocalCluster
from tests.engine.phased import Phased
from tests.engine.test_drafted_answers import PLACES, answered, asked_of
from tests.families import tiny

ONE_OF_EACH = ("specforge", "z-lab")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_drafts_are_those_of_a_plain_reference_and_answers_those_without(
    form, tiny_checkpoint, oracle, tmp_path
):
    """Prompts come in pieces, and two of them have a beginning in common that is found."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    head = head_in(tmp_path / "head", form)
    texts = prompts()
    asked = requests([*texts, texts[2][:24] + texts[0]], GREEDY)
    wanted = collect(drive(colocated(source, config(max_batch_tokens=16)), asked))
    node = colocated(source, config(max_batch_tokens=16, draft=f"{METHOD[form]}:{head}:4"))
    told = guesses_of(node)
    assert collect(drive(node, asked)) == wanted
    drafts = node.stats().drafts
    assert getattr(drafts.drafters, METHOD[form]).tokens == drafts.tokens > 100
    check(told, Reference(form, oracle("qwen3")))


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("form", ["specforge", "flash of speculators", "newest first", "dspark"])
def test_what_was_right_is_gone_on_with(form, tiny_checkpoint, oracle, tmp_path):
    """A head that knows three tokens, and answers of no others: some of what it drafts is right."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    head = head_in(tmp_path / "head", form, draft_vocab_size=3)
    tensors, reference = tensors_of(form), Reference(form, oracle("qwen3"))
    known = [20, 100, 180]
    few = {
        **{name: x[:3].clone() for name, x in tensors.items() if name == "markov_head.markov_w2.weight"},
        "lm_head.weight": tensors["lm_head.weight"][:3].clone(),
        "d2t": torch.tensor(known) - torch.arange(3),
    }
    reference.w |= few
    save_file(tensors | few, head / "model.safetensors")
    params = SamplingParams(
        max_tokens=60, temperature=0.0, ignore_eos=True, logit_bias=tuple((token, 100.0) for token in known)
    )
    asked = requests(prompts(), params)
    wanted = collect(drive(colocated(source, config()), asked))
    node = colocated(source, config(draft=f"{METHOD[form]}:{head}:4"))
    told = guesses_of(node)
    assert collect(drive(node, asked)) == wanted
    drafts = node.stats().drafts
    assert drafts.accepted > 20 and drafts.positions.p2 > 0
    check(told, reference)


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("form", ["speculators", "newest first", "dspark"])
@pytest.mark.parametrize("place", PLACES)
def test_all_is_told_as_without_drafts(place, form, tiny_checkpoint, tmp_path):
    """Of requests of all kinds, in a cache that is too small for them: some are preempted in mid-draft."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    head = head_in(tmp_path / "head", form)
    asked = asked_of(random.Random(5), 24)
    plain = answered(source, place, asked, kv_blocks=26, max_batch_tokens=24)
    drafted = answered(source, place, asked, f"{METHOD[form]}:{head}:3", kv_blocks=26, max_batch_tokens=24)
    assert drafted == plain


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gptoss", {"window_blocks": 70}),
        ("qwen3-next", {}),
        ("granite", {}),
        ("v3", {"expert_dtype": "int4"}),
    ],
)
def test_any_model_may_have_a_head(family, fields, tiny_checkpoint, tmp_path):
    """With layers that see a window, that keep states, whose embedding is scaled, whose experts are rounded."""
    folder = tiny_checkpoint(family) if family in TINY else tmp_path / "model"
    if family not in TINY:
        folder.mkdir()
        tiny.build(family, folder)
    source = ModelSource(str(folder), family, dtype="bfloat16")
    heads = {METHOD[form]: head_in(tmp_path / form, form) for form in ONE_OF_EACH}
    asked = asked_of(random.Random(8), 10)
    for place in ("colocated", "1x1"):
        plain = answered(source, place, asked, **fields)
        for method, head in heads.items():
            assert answered(source, place, asked, f"{method}:{head}:3", **fields) == plain


@pytest.mark.slow
@pytest.mark.parametrize("form", ONE_OF_EACH)
def test_what_was_found_or_handed_over_is_drafted_for_as_well(form, tiny_checkpoint, tmp_path):
    """The head's keys of a prompt come with its blocks: the same tokens are drafted there."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    made = config(draft=f"{METHOD[form]}:{head_in(tmp_path / 'head', form)}:3")
    asked = requests(prompts((40, 33)))

    def drafted(told):
        return {(handle, len(tokens)): drafted for handle, tokens, drafted, _ in told if drafted}

    node = colocated(source, made)
    told = guesses_of(node)
    wanted = collect(drive(node, asked))
    known, hits = drafted(told), node.stats().prefix_hits
    told.clear()
    assert collect(drive(node, asked)) == wanted and node.stats().prefix_hits > hits
    assert drafted(told) == known and len(known) > 80
    cluster = LocalCluster.build(source, made, attention=2, experts=1)
    world = Phased(cluster, 1)
    told = guesses_of(world.decoding[0].node)
    for request in asked:
        world.submit(request, world.prefilling[0], world.decoding[0])
    world.run()
    cluster.close()
    assert [world.said[request.handle] for request in asked] == wanted
    assert world.decoding[0].moves.stats().handed == 2
    later = {key: guess for key, guess in drafted(told).items() if key[1] > len(asked[key[0]].prompt_ids) + 1}
    assert len(later) > 60 and all(known[key] == guess for key, guess in later.items())


PASSED: dict[str, Any] = {
    "torch_dtype": "bfloat16", "transformers_version": "4.53.1", "attention_dropout": 0.1, "initializer_range": 0.02,
    "pretraining_tp": 4, "use_cache": True, "tie_word_embeddings": False, "bos_token_id": 1,
    "temperature": 0.3, "num_beams": 4, "id2label": {"0": "LABEL_0"}, "is_decoder": True,
}  # fmt: skip
EAGLE: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 64}, "hidden_size: 64, but qwen3_moe here has 48; the head is of another model"),
    ({"vocab_size": 300}, "vocab_size: 300, but qwen3_moe here has 211"),
    ({"draft_vocab_size": 212}, "draft_vocab_size: 212 is more than vocab_size"),
    ({"draft_vocab_size": 91}, r"lm_head.weight has shape \(90, 48\), config.json wants \(91, 48\)"),
    ({"intermediate_size": 63}, r"mlp.gate_proj.weight has shape \(64, 48\), config.json wants \(63, 48\)"),
    ({"attention_bias": True}, "no midlayer.self_attn.q_proj.bias, which an EAGLE-3 head"),
    ({"num_hidden_layers": 2}, "num_hidden_layers: 2 is not supported: heads of one layer are run"),
    ({"model_type": "deepseek_v3"}, "model_type: 'deepseek_v3' is not one of llama, qwen3"),
    ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
    ({"rope_scaling": {"rope_type": "odd"}}, "rope_type 'odd'"),
    ({"architectures": ["LlamaForCausalLM"]}, r"architectures: .* is no EAGLE-3 head"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, r"behind layers \(1, 2, 4\)"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, r"fc.weight has shape \(48, 144\)"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: False is not supported"),
    ({"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config: use_mtp_layernorm: True is not supported"),
    ({"eagle_config": {"norm_before_fc": True}}, "no input_norm.weight"),
    ({"quantization_config": {"bits": 4}}, "quantization_config: .* is not supported"),
    ({"speculators_model_type": "eagle"}, "speculators_model_type: 'eagle' is not supported"),
    ({"ptd_token_id": 7}, "ptd_token_id: 7 is not supported: it is neither read nor known to change nothing"),
    ({"eagle_config": {"odd": 1}}, "eagle_config: odd: 1 is not supported"),
    ({"parallel_draft_step": 2}, "parallel_draft_step: 2 is not supported"),
    ({"use_sliding_window": True}, "use_sliding_window: True is not supported"),
    ({"is_causal": False}, "is_causal: False is not supported"),
    ({"is_neox_style": False}, "is_neox_style: False is not supported"),
]
EAGLE_OF_SPECULATORS: list[tuple[dict[str, Any], str]] = [
    ({"logit_scale": 0.5}, "logit_scale: 0.5 is not supported"),
    (
        {"transformer_layer_config": LAYER | {"clip_qkv": 8.0}},
        "transformer_layer_config: clip_qkv: 8.0 is not supp",
    ),
    (
        {"transformer_layer_config": LAYER | {"attn_output_gate": True}},
        "attn_output_gate: True is not supported",
    ),
]


FLASH: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 64}, "--draft dflash: .*: hidden_size: 64, but qwen3_moe here has 48"),
    ({"architectures": ["DFlash2DraftModel"]}, "architectures: .* is no DFlash head that is run"),
    ({"architectures": []}, "architectures: .* is no DFlash head that is run"),
    ({"block_size": 1}, "block_size: 1 is not a whole number in"),
    ({"num_target_layers": 4}, "num_target_layers: 4 is not the number of layers of qwen3_moe here, 3"),
    (
        {"num_hidden_layers": 3, "layer_types": None},
        "no layers.2.self_attn.q_proj.weight, which a DFlash head",
    ),
    (
        {"num_hidden_layers": 1, "layer_types": None},
        "layers.1.* is there, and no field of config.json asks for it",
    ),
    ({"layer_types": ["full_attention"]}, "layer_types: .* for each of 2 layers"),
    ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}, "sliding_window: missing"),
    ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}, "use_sliding_window: false, or absent"),
    (
        {
            "layer_types": ["sliding_attention"] * 2,
            "use_sliding_window": True,
            "sliding_window": 9,
            "is_causal": False,
        },
        "false is not supported",
    ),
    ({"rope_interleave": True}, "rope_interleave: True is not supported"),
    ({"output_multiplier": 0.5}, "output_multiplier: 0.5 is not supported"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0 is not supported; leave it out"),
    ({"input_embedding_scale": 0.0}, "input_embedding_scale: 0.0 is not"),
    ({"projector_type": "dspark"}, "projector_type: 'dspark' is not supported"),
    (
        {"dflash_config": {"mask_token_id": 7, "target_hidden_size": 64}},
        "target_hidden_size: 64 is not that of",
    ),
    (
        {"dflash_config": {"mask_token_id": 7, "odd": 1}},
        "dflash_config: odd: 1 is not supported: it is neither",
    ),
    ({"dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id: missing"),
    ({"dflash_config": {"mask_token_id": 211}}, "mask_token_id: 211 is none of the 211 of vocab_size"),
    ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 3]}}, r"behind layers \(1, 4\)"),
    ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0]}}, r"fc.weight has shape \(48, 96\)"),
    (
        {"dflash_config": {"mask_token_id": 7, "projector_type": "dspark"}},
        "projector_type: 'dspark' is not supp",
    ),
    (
        {"dflash_config": {"mask_token_id": 7, "use_swa": True}},
        "dflash_config: use_swa: True is not supported",
    ),
    ({"draft_vocab_size": 90}, "no lm_head.weight: which of 211 tokens its 90 are is not known"),
    ({"quantization_config": {"bits": 4}}, "quantization_config: .* is not supported"),
    ({"speculators_model_type": "dspark"}, "speculators_model_type: 'dspark' is not supported"),
]
FLASH_OF_SPECULATORS: list[tuple[dict[str, Any], str]] = [
    ({"projector_type": "domino"}, "projector_type: 'domino' is not supported; supported: \"dflash\""),
    ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids: missing"),
    ({"shift_label": True}, "shift_label: True is not supported"),
    ({"logit_scale": 0.5}, "logit_scale: 0.5 is not supported"),
    ({"draft_adapter_rank": 4}, "draft_adapter_rank: 4 is not supported"),
    (
        {"transformer_layer_config": QWEN | {"attention_bias": True, "rope_interleave": True}},
        "transformer_layer_config: rope_interleave: True is not supported",
    ),
    ({"markov_rank": 8}, "markov_rank: 8 is not supported: it is neither read nor"),
    (
        {
            "sliding_window_non_causal": True,
            "transformer_layer_config": QWEN
            | {
                "attention_bias": True,
                "layer_types": ["sliding_attention"] * 2,
                "use_sliding_window": True,
                "sliding_window": 9,
            },
        },
        "sliding_window_non_causal: True is not supported for layers with a window",
    ),
]
SPARK: list[tuple[dict[str, Any], str]] = [
    (
        {"speculators_model_type": None},
        "speculators_model_type: missing: DSpark heads are run in speculators' form",
    ),
    ({"speculators_model_type": "dflash"}, "speculators_model_type: 'dflash' is not supported"),
    ({"markov_head_type": "gated"}, "markov_head_type: 'gated' is not supported; supported: \"vanilla\""),
    ({"markov_rank": 9}, r"markov_head.markov_w1.weight has shape \(211, 8\), config.json wants \(211, 9\)"),
    ({"markov_rank": 0}, "markov_rank: 0 leaves nothing that confidence_head_with_markov could read"),
    (
        {"enable_confidence_head": False},
        "confidence_head.proj.bias is there, and no field of config.json asks",
    ),
    (
        {"confidence_head_with_markov": False},
        r"confidence_head.proj.weight has shape \(1, 56\), .* \(1, 48\)",
    ),
    ({"mask_token_id": 211}, "mask_token_id: 211 is none of the 211 of vocab_size"),
]
WRONG = [
    *(("specforge", *one) for one in EAGLE),
    *(("speculators", *one) for one in EAGLE_OF_SPECULATORS),
    *(("z-lab", *one) for one in FLASH),
    *(("flash of speculators", *one) for one in FLASH_OF_SPECULATORS),
    *(("dspark", *one) for one in SPARK),
]


@pytest.mark.parametrize(("form", "fields", "told"), WRONG)
def test_a_head_that_does_not_fit_is_refused_before_anything_runs(
    form, fields, told, tiny_checkpoint, tmp_path
):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    refused(source, form, head_in(tmp_path / "head", form, **fields), told)


def test_a_declared_method_is_known_wherever_one_has_to_be():
    heads = {method for method, one in BESIDE.items() if one.what == HEAD}
    assert heads == READERS.keys() and heads <= DRAFTERS.keys()
    assert {method for method in heads if DRAFTERS[method].at_once} == {
        one for one in heads if BESIDE[one].at_once
    }
    assert {field.name for field in fields(StatsByDrafter)} >= LAYERS


@pytest.mark.parametrize("form", FORMS)
def test_fields_that_change_nothing_are_passed_over(form, tiny_checkpoint, tmp_path):
    """Those that transformers 4 and the trainers of heads leave in a config.json."""
    spec = load_spec(str(tiny_checkpoint("qwen3")))
    draft = DraftChoice.parse(f"{METHOD[form]}:{tmp_path / 'head'}")
    head = head_in(tmp_path / "head", form)
    plain = load_head(draft, spec)
    told: dict[str, Any] = {**FORMS[form], **PASSED}
    if layer := told.get("transformer_layer_config"):
        told["transformer_layer_config"] = layer | PASSED
    (head / "config.json").write_text(json.dumps(told))
    assert load_head(draft, spec) == plain


def refused(source, form, head, told):
    with pytest.raises(UserError, match=told) as refusal:
        planned_spec(source, DraftChoice.parse(f"{METHOD[form]}:{head}"))
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize(
    ("form", "called", "strange", "needed"),
    [
        ("specforge", "an EAGLE-3 head", ("midlayer.self_attn.q_proj.bias", "input_norm.weight"),
         ("fc.weight", "midlayer.hidden_norm.weight", "d2t")),
        ("z-lab", "a DFlash head", ("layers.1.self_attn.q_proj.bias", "markov_head.w", "mlp_head.weight"),
         ("fc.weight", "hidden_norm.weight", "layers.1.self_attn.k_norm.weight")),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused_before_anything_runs(
    form, called, strange, needed, tiny_checkpoint, tmp_path
):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    refused(source, form, tmp_path / "nowhere", f"nowhere/config.json: no such file; {called} is a folder")
    head = head_in(tmp_path / "head", form)
    assert planned_spec(source, DraftChoice.parse(f"{METHOD[form]}:{head}")) == load_spec(source.path)
    tensors = tensors_of(form)
    for name in strange:
        save_file(tensors | {name: torch.zeros(3)}, head / "model.safetensors")
        refused(source, form, head, f"{name} is there, and no field of config.json asks for it")
    for name in needed:
        save_file({each: one for each, one in tensors.items() if each != name}, head / "model.safetensors")
        refused(source, form, head, f"no {name}")
    (head / "model.safetensors").unlink()
    refused(source, form, head, "model.safetensors")


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        ("z-lab", {"block_size": None, "output_multiplier": 1, "projector_type": "dflash"}),
        (
            "z-lab",
            {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1], "target_hidden_size": 48}},
        ),
        (
            "flash of speculators",
            {"sliding_window_non_causal": True, "shift_label": False, "logit_scale": 1.0},
        ),
        ("dspark", {"speculators_config": {}, "transformers_version": "5"}),
    ],
)
def test_fields_that_change_nothing_are_read(form, fields, tiny_checkpoint, tmp_path):
    head = head_in(tmp_path / "head", form, **fields)
    unread = {"verifier_norm.weight": torch.zeros(48)}
    save_file(tensors_of(form) | unread, head / "model.safetensors")
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    planned_spec(source, DraftChoice.parse(f"{METHOD[form]}:{head}"))


def test_a_mask_apart_from_the_embedding_is_refused(tiny_checkpoint, tmp_path):
    head = head_in(tmp_path / "head", "z-lab")
    (head / "mask_embedding.pt").touch()
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    refused(source, "z-lab", head, "config.json: beside it stands mask_embedding.pt")


def test_tokens_beyond_the_vocabulary_are_refused_when_they_are_read(tiny_checkpoint, tmp_path):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    head = head_in(tmp_path / "head", "specforge")
    tensors = tensors_of("specforge")
    tensors["d2t"][-1] = VOCAB
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"d2t names tokens from . to 300, the model has 211"):
        colocated(source, config(draft=f"eagle3:{head}"))


@pytest.mark.parametrize("method", ["eagle3", "dflash", "dspark"])
@pytest.mark.parametrize(
    ("text", "head", "tokens"),
    [("/a/b", "/a/b", None), ("/a/b:4", "/a/b", 4), ("/a:b", "/a:b", None), ("/a:7:2", "/a:7", 2)],
)
def test_a_folder_stands_behind_the_method(method, text, head, tokens):
    choice = DraftChoice.parse(f"{method}:{text}")
    assert (choice.head, choice.tokens, str(choice)) == (head, tokens, f"{method}:{text}")
    words = {"method": method, "model": head} | ({"num_speculative_tokens": tokens} if tokens else {})
    assert choice_of(json.dumps(words)) == choice


@pytest.mark.parametrize("method", ["eagle3", "dflash", "dspark"])
@pytest.mark.parametrize("text", ["", ":", ":/a:0", ":/a:17"])
def test_a_head_without_a_folder_or_with_too_many_tokens_is_refused(method, text):
    with pytest.raises(ConfigError, match=rf"{method}:FOLDER:N|from 1 to 16"):
        DraftChoice.parse(f"{method}{text}")


def test_more_tokens_than_a_block_guesses_are_refused(tiny_checkpoint, tmp_path):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    head = head_in(tmp_path / "head", "z-lab")
    planned_spec(source, DraftChoice.parse(f"dflash:{head}:4"))
    with pytest.raises(ConfigError, match=r"block_size 5: it guesses 4 tokens at most; write dflash:.*:4"):
        planned_spec(source, DraftChoice.parse(f"dflash:{head}:5"))


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("form", ["specforge", "qwen3", "z-lab", "dspark"])
def test_what_was_read_while_it_rested_is_drafted_behind_as_well(
    form, tiny_checkpoint, oracle, tmp_path, monkeypatch
):
    """Its blocks are found later, by who drafts."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    head, asked = head_in(tmp_path / "head", form), requests(prompts())
    node = colocated(source, config(max_batch_tokens=16, draft=f"{METHOD[form]}:{head}:4"))
    told, follower = guesses_of(node), node._micro_batches[0]._follower
    assert isinstance(follower, BlockLoop | LayerLoop)
    trials = SimpleNamespace(awake=False)
    monkeypatch.setattr(follower.drafter, "trials", trials)
    drive(node, asked)
    assert told and not any(drafted for _, _, drafted, _ in told)
    told.clear()
    trials.awake, hits = True, node.stats().prefix_hits
    drive(node, asked)
    assert node.stats().prefix_hits > hits
    check(told, Reference(form, oracle("qwen3")))


@pytest.mark.slow
def test_a_block_is_one_pass_however_much_of_it_is_verified(tiny_checkpoint, oracle, tmp_path, monkeypatch):
    """The price takes what pays of all that the pass has guessed."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    node = colocated(source, config(draft=f"dflash:{head_in(tmp_path / 'head', 'z-lab')}"))
    batch, told, passes = node._micro_batches[0], guesses_of(node), list[int]()
    follower = batch._follower
    assert isinstance(follower, BlockLoop) and follower.passes == 1
    follower.drafter.trials = None  # it never rests
    ticks = count()  # each look at the clock is a tenth of a millisecond later, whatever the machine does
    monkeypatch.setattr(node._meter, "now", lambda: next(ticks) * 1e-4)
    block_rows = follower._head.block_rows

    def noted(token_R, caches, blocks):
        passes.append(len(token_R))
        return block_rows(token_R, caches, blocks)

    monkeypatch.setattr(follower._head, "block_rows", noted)
    drive(node, requests(prompts()))
    check(told, Reference("z-lab", oracle("qwen3")))
    assert 40 < len(passes) <= batch.steps and max(passes) == 3 * BLOCK
    assert node.stats().drafts.tokens < sum(passes) / 2


@pytest.mark.parametrize("form", ["z-lab", "dspark"])
def test_a_block_ends_with_the_context(form, tiny_checkpoint, tmp_path, monkeypatch):
    source, seen = ModelSource(str(tiny_checkpoint("qwen3")), "q"), list[int]()
    asked = requests(prompts((25, 31)), replace(GREEDY, max_tokens=9))
    wanted = collect(drive(colocated(source, config(max_model_len=40)), asked))
    draft = f"{METHOD[form]}:{head_in(tmp_path / 'head', form)}:4"
    node = colocated(source, config(max_model_len=40, draft=draft))
    follower = node._micro_batches[0]._follower
    assert isinstance(follower, BlockLoop)
    block_rows = follower._head.block_rows

    def noted(token_R, caches, blocks):
        seen.extend(blocks.position_T.tolist())
        return block_rows(token_R, caches, blocks)

    monkeypatch.setattr(follower._head, "block_rows", noted)
    assert collect(drive(node, asked)) == wanted
    assert max(seen) == 39 - follower._spec.from_newest and node.stats().drafts.tokens > 10


@pytest.mark.slow
@pytest.mark.parametrize("form", ONE_OF_EACH)
def test_steps_of_several_calls_draft_what_steps_layer_by_layer_do(
    form, tiny_checkpoint, tmp_path, monkeypatch
):
    """And say in which layer a row was spoiled."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    made = config(draft=f"{METHOD[form]}:{head_in(tmp_path / 'head', form)}:2")
    asked = requests(prompts((9, 30)))

    def drafted(node):
        told = guesses_of(node)
        return collect(drive(node, asked)), told

    node = colocated(source, made)
    runner = node._micro_batches[0]._runner
    if not isinstance(runner, StackRunner):
        pytest.skip("the native library was not built")
    assert [(part.first, part.end) for part in runner._parts] == [(0, 1), (1, 2), (2, 3)]
    found = drafted(node)
    with monkeypatch.context() as patch:
        patch.setattr("afserve.engine.step.stack_runner.fits_one_call", lambda step, meter: False)
        assert drafted(colocated(source, made)) == found
    node = colocated(source, made)
    bound = node.kv.halves[1].bound
    assert bound is not None
    bound.layer.post_norm_H.fill_(float("nan"))
    node.submit(asked[0])
    events = []
    while node.busy:
        events += node.step()
    assert "layer 1" in str(events[0].error)


@pytest.mark.parametrize(("form", "layers"), [("speculators", 1), ("z-lab", 2)])
def test_its_memory_is_planned_with(form, layers, tiny_checkpoint, tmp_path):
    """Weights on attention nodes, and so many more layers in every block; nothing on expert nodes."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    head, spec = head_in(tmp_path / "head", form), load_spec(source.path)
    draft, machine = f"{METHOD[form]}:{head}", Machine(8, 8 << 30, 16 << 30)

    def chosen(draft):
        wishes = Wishes(1, 2, kv_tokens=1600, engine=EngineSettings(draft=draft))
        return choose(planned_spec(source, DraftChoice.parse(draft)), source, machine, wishes)

    plain, drafting = chosen("off"), chosen(draft)
    stored = sum(x.numel() for name, x in tensors_of(form).items() if name not in ("d2t", "t2d"))
    kept = 4 * 2 * GROUPS * SIZE * layers
    assert drafting.attention.weights - plain.attention.weights == 4 * stored
    assert drafting.attention.kv - plain.attention.kv == kept * 1600
    assert drafting.expert == plain.expert and drafting.spec == spec
    assert drafting.picked["draft"] == f"{METHOD[form]} of {head}, as many tokens a step as pay"
    node = colocated(source, config(draft=draft))
    assert node.kv.block_bytes == 8 * (kept + spec.kv_bytes_per_token(4))


@pytest.mark.parametrize("form", ONE_OF_EACH)
def test_caches_of_other_heads_share_no_blocks(form, tiny_checkpoint, tmp_path):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    heads = [head_in(tmp_path / str(number), form) for number in range(3)]
    tensors = tensors_of(form)
    tensors["norm.weight"][0] += 1.0
    save_file(tensors, heads[2] / "model.safetensors")
    found = [colocated(source, config(draft=f"{METHOD[form]}:{head}")).kv.fingerprint for head in heads]
    assert found[0] == found[1] != found[2]
    turned = head_in(tmp_path / "turned", form, rope_theta=6000.0)
    assert colocated(source, config(draft=f"{METHOD[form]}:{turned}")).kv.fingerprint not in found


def test_the_scores_of_a_model_are_not_scaled_for_a_head(tmp_path):
    """Others are added to them, and they say how likely a guess is."""
    folder = tmp_path / "model"
    folder.mkdir()
    tiny.build("granite", folder)
    head = head_in(tmp_path / "head", "z-lab")
    model = colocated(ModelSource(str(folder), "g"), config(draft=f"dflash:{head}"))._micro_batches[0]._model
    assert model.head is not None and model.spec.around.logit_scale == 0.5
    normed_SH = torch.randn(5, 48, generator=torch.Generator().manual_seed(1)).to(model.dtype)
    torch.testing.assert_close(model.head.normed_scores(normed_SH), 2.0 * model.scores(normed_SH))


def test_the_places_of_many_blocks_are_scored_some_at_a_time(tiny_checkpoint, tmp_path, monkeypatch):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    made = config(draft=f"dspark:{head_in(tmp_path / 'head', 'dspark')}")
    head = colocated(source, made)._micro_batches[0]._model.head
    assert isinstance(head, DsparkHead)
    scored, scores = list[int](), head.normed_scores

    def noted(normed_SH):
        scored.append(len(normed_SH))
        return scores(normed_SH)

    monkeypatch.setattr(head, "normed_scores", noted)
    normed_RH = torch.randn(20, 48, generator=torch.Generator().manual_seed(1))
    places, newest = [range(at, at + 4) for at in range(0, 20, 4)], [3, 4, 5, 6, 7]
    wanted = [*chain(*head.guesses(normed_RH, places, newest))]
    monkeypatch.setattr("afserve.models.drafters.dspark.SCORED", 2)
    found = [*chain(*head.guesses(normed_RH, places, newest))]
    assert [one.token for one in found] == [one.token for one in wanted]
    assert [one.chance for one in found] == pytest.approx([one.chance for one in wanted], rel=1e-5)
    assert scored == [5] * 4 + [2, 2, 1] * 4


@pytest.mark.slow
@pytest.mark.parametrize("form", ONE_OF_EACH)
def test_a_node_of_several_devices_has_the_head_on_its_first(form, tiny_checkpoint, tmp_path):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    made = config(draft=f"{METHOD[form]}:{head_in(tmp_path / 'head', form)}:2")
    asked = requests(prompts((9, 30)))
    plain, node = colocated(source, made), colocated(source, replace(made, tensor_parallel=2))
    told, wanted = guesses_of(node), guesses_of(plain)
    assert collect(drive(node, asked)) == collect(drive(plain, asked))
    assert [guess[:3] for guess in told] == [guess[:3] for guess in wanted] and len(told) > 60
