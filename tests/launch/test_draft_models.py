"""`--draft model:FOLDER` before anything runs: whose tokens are whose, what it takes, and how it is asked for."""

import json
import shutil

import pytest
import torch
import transformers

from afserve.config import EngineSettings, ModelSource
from afserve.drafts import DraftChoice, DraftMethod
from afserve.errors import ConfigError, UserError
from afserve.launch.plan.drafting import planned_spec
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import CONFIGS
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Wishes
from afserve.speculative_config import choice_of

NANO = CONFIGS / "nano"
SOURCE = ModelSource(str(NANO), "nano")
VOCAB = json.loads((NANO / "config.json").read_text())["vocab_size"]


@pytest.fixture
def small(tmp_path):
    """A model without experts that has nano's tokens."""
    folder = tmp_path / "small"
    fields = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(fields).save_pretrained(folder)
    shutil.copy(NANO / "tokenizer.json", folder)
    return folder


def vocabulary_of(folder, change):
    """`change` what the draft model's tokenizer has."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    change(tokenizer)
    path.write_text(json.dumps(tokenizer))


def refused(folder, said):
    with pytest.raises(UserError, match=said) as refusal:
        planned_spec(SOURCE, DraftChoice.parse(f"model:{folder}"))
    assert refusal.value.exit_code == 2


def test_tokens_have_to_be_the_same(small):
    assert planned_spec(SOURCE, DraftChoice.parse(f"model:{small}:2")) == planned_spec(SOURCE, DraftChoice())

    def swap(tokenizer):
        words = tokenizer["model"]["vocab"]
        one, other = list(words)[300:302]
        words[one], words[other] = words[other], words[one]

    vocabulary_of(small, swap)
    refused(small, r"is token 301 of .*small, and 300 of .*nano; take a draft model of the same tokenizer")


def test_a_token_that_it_has_not_is_named_unless_it_was_added(small):
    def drop_added(tokenizer):
        tokenizer["added_tokens"] = []

    def drop_last(tokenizer):
        words = tokenizer["model"]["vocab"]
        del words[list(words)[-1]]
        tokenizer["model"]["merges"] = []

    vocabulary_of(small, drop_added)
    planned_spec(SOURCE, DraftChoice.parse(f"model:{small}"))
    vocabulary_of(small, drop_last)
    refused(small, r"small has no token '.*', which is \d+ of .*nano")
    (small / "tokenizer.json").unlink()
    refused(small, "has no tokenizer.json, so whether its tokens are those of .*nano is not known")


def test_its_memory_is_planned_with(small):
    """Weights, and as many tokens of KV as the node has; nothing on expert nodes."""

    def chosen(draft):
        wishes = Wishes(1, 2, kv_tokens=1600, engine=EngineSettings(draft=draft))
        return choose(
            planned_spec(SOURCE, DraftChoice.parse(draft)), SOURCE, Machine(8, 8 << 30, 16 << 30), wishes
        )

    plain, drafting = chosen("off"), chosen(f"model:{small}")
    numbers = sum(
        x.numel() for x in transformers.LlamaForCausalLM.from_pretrained(small).state_dict().values()
    )
    assert drafting.attention.weights - plain.attention.weights == 2 * numbers
    assert drafting.attention.kv - plain.attention.kv == 2 * (2 * 2 * 1 * 16) * 1600
    assert drafting.expert == plain.expert and drafting.spec == plain.spec
    assert drafting.picked["draft"] == f"model of {small}, as many tokens a step as pay"


def test_it_is_asked_for_in_vllms_words_too():
    for words in ({"method": "draft_model", "model": "/a:b"}, {"model": "/a:b"}):
        assert choice_of(json.dumps(words)) == DraftChoice.parse("model:/a:b")
        assert choice_of(json.dumps(words | {"num_speculative_tokens": 4})) == DraftChoice.parse(
            "model:/a:b:4"
        )
    choice = DraftChoice.parse("model:/a:b:4")
    assert (choice.method, choice.model, choice.head, choice.most) == (DraftMethod.MODEL, "/a:b", "", 4)
    assert DraftChoice.parse("model:x").most == 8
    for text in ("model", "model:"):
        with pytest.raises(
            ConfigError, match="model needs the folder of a draft model; write model:FOLDER or"
        ):
            DraftChoice.parse(text)
