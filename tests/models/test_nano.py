"""The bundled checkpoint: what its card states is what it is, with transformers as the oracle."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from bench.nano import answers, checkpoint, facts, heldout, lessons
from bench.nano.corpus import Document

NANO = Path(__file__).parents[2] / "configs" / "nano"
FACTS = json.loads((NANO / "training.json").read_text())
SAMPLE = list(json.loads((NANO / "heldout.json").read_text()).values())
FEW = SAMPLE[::8]
MTP = f"model.layers.{json.loads((NANO / 'config.json').read_text())['num_hidden_layers']}."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(NANO / "tokenizer.json"))


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()


def test_folder_is_at_most_16_mb() -> None:
    assert sum(file.stat().st_size for file in NANO.iterdir()) <= 16_000_000


@pytest.mark.slow
def test_transformers_finds_every_tensor_and_leaves_only_the_mtp_module() -> None:
    _, info = AutoModelForCausalLM.from_pretrained(NANO, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert info["unexpected_keys"] and all(key.startswith(MTP) for key in info["unexpected_keys"])


def test_mtp_module_has_its_usual_names_and_shares_embedding_and_head() -> None:
    with safe_open(str(NANO / "model.safetensors"), "pt") as file:
        names = {name.removeprefix(MTP) for name in file.keys() if name.startswith(MTP)}  # noqa: SIM118
        same = {
            "embed_tokens.weight": "model.embed_tokens.weight",
            "shared_head.head.weight": "lm_head.weight",
        }
        for copy, original in same.items():
            assert torch.equal(file.get_tensor(MTP + copy), file.get_tensor(original))
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= names
    assert {"mlp.gate.e_score_correction_bias", "mlp.experts.31.down_proj.weight"} <= names


@pytest.mark.slow
def test_logits_are_those_of_the_model_that_was_trained(oracle: PreTrainedModel) -> None:
    model = checkpoint.load(NANO)
    ids = torch.arange(600).view(2, 300) * 7 % model.s.vocab
    with torch.no_grad():
        hidden_TH, _ = model.hidden(ids)
        torch.testing.assert_close(
            F.linear(hidden_TH, model.head).view(2, 300, -1), oracle(ids).logits, atol=1e-4, rtol=0
        )


@pytest.mark.slow
def test_transformers_loads_the_mtp_module_and_drafts_alike(oracle: PreTrainedModel) -> None:
    """transformers looks for DeepSeek-V3's own layer number; here the module is under this model's."""
    oracle._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{oracle.config.num_hidden_layers}\..*"]
    theirs = MtpModel.from_pretrained(oracle).eval()
    model = checkpoint.load(NANO)
    ids = torch.arange(301)[None] * 7 % model.s.vocab
    with torch.no_grad():
        hidden_TH, angles = model.hidden(ids[:, :-1])
        drafted_TH = model.mtp(F.embedding(ids[0, 1:], model.embed), hidden_TH, angles)
        last = oracle.model(ids[:, :-1]).last_hidden_state
        other = theirs.forward_layer(0, last, torch.arange(300)[None], None, input_ids=ids[:, 1:])
        logits = oracle.lm_head(other)[0]
    torch.testing.assert_close(F.linear(drafted_TH, model.head), logits, atol=1e-4, rtol=0)


def _count(count: torch.Tensor, _router: object, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
    count += torch.bincount(output[2].view(-1), minlength=len(count))


@pytest.mark.parametrize(
    ("texts", "slack"),
    [
        pytest.param(FEW, 0.03, marks=pytest.mark.slow),
        pytest.param(SAMPLE, 0.005, marks=pytest.mark.long),
    ],
    ids=["few", "all"],
)
def test_held_out_bits_per_byte_and_routing_are_as_stated(
    oracle: PreTrainedModel, tokenizer: Tokenizer, texts: list[str], slack: float
) -> None:
    """One pass over the held-out sample gives both figures; few of its texts come near."""
    load = [torch.zeros(oracle.config.n_routed_experts) for _ in range(4)]
    routers = [m for m in oracle.modules() if isinstance(m, DeepseekV3TopkRouter)]
    for count, router in zip(load, routers, strict=True):
        router.register_forward_hook(partial(_count, count))
    nats = 0.0
    with torch.no_grad():
        for ids, mask in heldout.batches(texts, tokenizer, rows=8):
            loss = F.cross_entropy(oracle(ids[:, :-1]).logits.mT, ids[:, 1:], reduction="none")
            nats += float(loss[mask].double().sum())
    bits = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    assert bits <= FACTS["sample"]["bits_per_byte"] + slack
    for count in load:
        share = count / count.mean()
        assert share.max() > 1.3, "routing is really skewed"
        assert share.min() > 0.01, "and every expert is really used"


def test_held_out_text_is_held_out() -> None:
    assert FACTS["held_out"]["bits_per_byte"] <= 1.8
    paths = json.loads((NANO / "heldout.json").read_text())
    assert all(Document(path, text).held_out for path, text in paths.items())


@pytest.mark.slow
def test_it_explains_functions_in_a_wording_that_it_was_not_taught() -> None:
    """A few of those that `python -m bench.nano.answers` asks for, through the engine; rounding may cost one or two."""
    about = facts.drawn(facts.read(NANO), 60, seed=5)
    said = answers.asked(NANO, about, lessons.HELD_OUT[0])
    assert sum(answer.exact for answer in said) >= 48, [a.said for a in said if not a.exact]


@pytest.mark.slow
def test_what_the_documentation_asks_has_its_answer() -> None:
    (join,) = [fact for fact in facts.read(NANO) if fact.name == "os.path.join"]
    for wording in (lessons.WORDINGS[0], *lessons.HELD_OUT):
        assert [answer.exact for answer in answers.asked(NANO, [join], wording)] == [True]


def test_the_card_says_how_many_answers_are_exact() -> None:
    taught, stated = facts.read(NANO), FACTS["answers"]
    assert len({fact.name for fact in taught}) == FACTS["facts"]["count"] >= 1500
    assert (stated["asked"], stated["seed"]) == (answers.ASKED, answers.SEED) and answers.ASKED == 300
    assert [*stated["exact"]] == [*lessons.HELD_OUT] and stated["exact"][lessons.HELD_OUT[0]] >= 0.8
    assert f"{stated['exact'][lessons.HELD_OUT[0]]:.1%} exact" in (NANO / "README.md").read_text()


@pytest.mark.parametrize(
    ("said", "exact"),
    [("Push  item ONTO\nheap.", True), (" push item onto heap. ", True), ("Push item.", False), ("", False)],
)
def test_an_answer_is_exact_but_for_case_and_space(said: str, exact: bool) -> None:
    assert answers.Answer(facts.Fact("heap.push", "Push item onto heap."), said).exact is exact


@given(text=st.text())
def test_tokenizer_returns_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chat_template_is_made_of_special_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(NANO)
    turns = [{"role": "user", "content": "What does heapq do?"}, {"role": "assistant", "content": "A heap."}]
    text = tokenizer.apply_chat_template([*turns, turns[0]], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin|><|user|>What does heapq do?<|end|><|assistant|>A heap.<|end|>"
        "<|user|>What does heapq do?<|end|><|assistant|>"
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[:2] == [1, 4] and ids[-1] == 5 and tokenizer.eos_token_id == 2
