"""Drafts by a checkpoint's layer of multi-token prediction: the same tokens in fewer steps, wherever its layers run."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from afserve.config import ModelSource
from afserve.drafts import NO_DRAFTS, DraftChoice
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.errors import ConfigError
from afserve.launch.plan.drafting import planned_spec
from tests.engine.driving import collect, config, drive

NANO = Path(__file__).parents[2] / "configs" / "nano"
SOURCE = ModelSource(str(NANO), "nano")
ROOMY = {"max_model_len": 512, "kv_blocks": 128, "block_size": 16, "max_batch_tokens": 128}


def held_out(count, tokens, params):
    """Beginnings of texts that nano never saw."""
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    texts = [*json.loads((NANO / "heldout.json").read_text()).values()][:count]
    ids = [tuple(tokenizer.encode(text, add_special_tokens=False).ids[:tokens]) for text in texts]
    return [GenerationRequest(i, prompt, params) for i, prompt in enumerate(ids)]


def test_nano_drafts_three_of_four_tokens_right_and_answers_the_same():
    asked = held_out(6, 120, SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True))
    plain, node = colocated(SOURCE, config(**ROOMY)), colocated(SOURCE, config(**ROOMY, draft="mtp:1"))
    assert collect(drive(node, asked)) == collect(drive(plain, asked))
    drafts = node.stats().drafts
    assert drafts.tokens == drafts.verified > 100
    assert drafts.accepted >= 0.6 * drafts.tokens
    assert node.stats().steps < 0.75 * plain.stats().steps


def copy_of_nano(folder, **fields):
    """With other fields in its config.json, and without the layer's tensors."""
    shutil.copytree(NANO, folder)
    told = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(told))
    tensors = load_file(folder / "model.safetensors")
    left = {name: one for name, one in tensors.items() if not name.startswith("model.layers.5.")}
    save_file(left, folder / "model.safetensors")
    return ModelSource(str(folder), "copy")


def test_a_model_without_such_a_layer_is_refused_by_name(tiny_checkpoint, tmp_path):
    unsaid = copy_of_nano(tmp_path / "unsaid", num_nextn_predict_layers=0)
    for source, told in [
        (ModelSource(str(tiny_checkpoint("qwen3")), "q"), "known for deepseek_v3, .*not for qwen3_moe"),
        (ModelSource(str(NANO), "nano", load_format="dummy", layers=3), "--layers leaves 3"),
        (unsaid, "num_nextn_predict_layers is 0 or missing"),
        (copy_of_nano(tmp_path / "lost"), r"has no model.layers.5.eh_proj.weight"),
    ]:
        with pytest.raises(ConfigError, match=told):
            planned_spec(source, DraftChoice.parse("mtp"))
        assert planned_spec(source, DraftChoice.parse("ngram")).predictors == 0
    assert (
        planned_spec(SOURCE, DraftChoice.parse("mtp:2")).moe_layers
        == planned_spec(SOURCE, NO_DRAFTS).moe_layers + 1
    )
