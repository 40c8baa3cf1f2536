"""Drafts by a small model of the same tokenizer: those of transformers' own, and answers as without.

Tiny models are random, so one of another shape is nearly always wrong; the served checkpoint as its own draft model is
always right where both compute the same bits.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.draft.draft_model import DraftModel
from afserve.engine.draft.layer_drafter import LayerDrafter
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.sequence import Sequence
from afserve.errors import CheckpointError, ConfigError
from afserve.families.drafters.dense import draft_model_spec
from tests.engine import test_lost_peer
from tests.engine.driving import GREEDY, collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.engine.phased import Phased, lose_the_decoding_one
from tests.engine.test_drafted_answers import PLACES, answered, asked_of, play, told
from tests.families.tiny import LLAMA3, SIZES

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"intermediate_size": 80, "rope_scaling": LLAMA3, "attention_bias": True}),
    "mistral": ("Mistral", {"intermediate_size": 80, "sliding_window": 9, "head_dim": 16}),
    "qwen2": ("Qwen2", {"intermediate_size": 80, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"intermediate_size": 80, "head_dim": 16}),
}


def small_in(folder: Path, name: str, **fields: Any) -> Path:
    family, own = DENSE[name]
    torch.manual_seed(len(name))
    made = getattr(transformers, family + "Config")(**{**SIZES, **own, **fields})
    model = getattr(transformers, family + "ForCausalLM")(made)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = small_in(tmp_path_factory.mktemp("small") / name, name)
        return made[name]

    return folder


@pytest.fixture
def drafted(monkeypatch):
    """What is drafted: tokens so far, and the draft behind them."""
    found = list[tuple[list[int], list[int]]]()
    guess = LayerDrafter.guess

    def noted(self, sequence, most):
        draft = guess(self, sequence, most)
        if draft.tokens:
            found.append(([*sequence.tokens], [*draft.tokens]))
        return draft

    monkeypatch.setattr(LayerDrafter, "guess", noted)
    return found


@pytest.fixture
def models(monkeypatch):
    """The draft models of nodes that are built meanwhile; in the end none holds a block."""
    made = list[DraftModel]()
    begin = DraftModel.__init__

    def noted(self, *args):
        made.append(self)
        begin(self, *args)

    monkeypatch.setattr(DraftModel, "__init__", noted)
    yield made
    for one in made:
        one.check()
        assert one.blocks.pool.used == 0


def check(drafted, model):
    """Greedy tokens of the model behind the text, whatever was guessed, found or given back before."""
    assert len(drafted) > 30
    for tokens, draft in random.Random(3).sample(drafted, 30):
        for at, token in enumerate(draft):
            with torch.no_grad():
                assert int(model(torch.tensor([tokens + draft[:at]])).logits[0, -1].argmax()) == token


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_drafts_are_those_of_transformers_and_answers_those_without(
    name, tiny_checkpoint, small, drafted, models
):
    """Texts are read in pieces of a few tokens, and two of them have a beginning in common that is found."""
    source, texts = ModelSource(str(tiny_checkpoint("qwen3")), "q"), prompts()
    asked = requests([*texts, texts[2][:24] + texts[0]], GREEDY)
    wanted = collect(drive(colocated(source, config(max_batch_tokens=16)), asked))
    node = colocated(source, config(max_batch_tokens=16, draft=f"model:{small(name)}:3"))
    assert collect(drive(node, asked)) == wanted
    drafts = node.stats().drafts
    assert drafts.drafters.model.tokens == drafts.tokens > 100 and len(models) == 1
    check(drafted, transformers.AutoModelForCausalLM.from_pretrained(small(name)).eval())


@pytest.mark.slow
def test_a_model_with_experts_that_is_always_right(tiny_checkpoint, oracle, drafted, models):
    """The served checkpoint itself, with all of its layers in one group: every draft is accepted, so that the last
    token of each was never read, and a step makes four tokens."""
    folder = tiny_checkpoint("qwen3")
    source, asked = ModelSource(str(folder), "q"), requests(prompts())
    plain = colocated(source, config())
    wanted = collect(drive(plain, asked))
    node = colocated(source, config(draft=f"model:{folder}:3"))
    assert collect(drive(node, asked)) == wanted
    drafts = node.stats().drafts
    assert drafts.accepted == drafts.tokens > 100 and drafts.positions.p2 > 30
    assert node.stats().steps < 0.4 * plain.stats().steps
    check(drafted, oracle("qwen3"))


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_all_is_told_as_without_drafts(place, tiny_checkpoint, small, models):
    """Of requests of all kinds, in a cache that is too small for them: some are preempted in mid-draft."""
    source, asked = ModelSource(str(tiny_checkpoint("qwen3")), "q"), asked_of(random.Random(5), 24)
    fields: dict[str, Any] = {"kv_blocks": 26, "max_batch_tokens": 24}
    plain = answered(source, place, asked, **fields)
    for folder, count in ((small("llama"), ":3"), (tiny_checkpoint("qwen3"), "")):
        assert answered(source, place, asked, f"model:{folder}{count}", **fields) == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [("v3", {"expert_dtype": "int4"}), ("qwen3-next", {}), ("mixtral-window", {"kv_dtype": "int8"})],
)
def test_any_model_may_have_one(name, fields, tiny_checkpoint, small):
    """With a latent, with states that are moved on, with layers that see a window."""
    source = ModelSource(str(tiny_checkpoint(name)), name, dtype="bfloat16")
    asked = asked_of(random.Random(8), 10)
    for place in ("colocated", "1x1"):
        plain = answered(source, place, asked, **fields)
        assert answered(source, place, asked, f"model:{small('qwen3')}:3", **fields) == plain


@pytest.mark.slow
def test_texts_of_a_cache_that_is_too_small_are_read_again(tiny_checkpoint, small, models):
    """The oldest texts give their blocks; what was guessed is never found as if it were known."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    asked = requests(prompts((20, 33, 40, 27, 38, 30, 25, 36)))
    wanted = collect(drive(colocated(source, config(kv_blocks=30)), asked))
    node = colocated(source, config(kv_blocks=30, draft=f"model:{small('qwen3')}:4"))
    assert collect(drive(node, asked)) == wanted
    assert node.stats().preemptions and node.stats().drafts.tokens > 200


@pytest.mark.slow
def test_the_node_that_decodes_is_lost_in_mid_draft(tiny_checkpoint):
    """Another one goes on, and its draft model reads what it has not seen."""
    folder = tiny_checkpoint("qwen3")
    source = ModelSource(str(folder), "q")
    asked = [one for one in asked_of(random.Random(7), 20) if not one.params.pooled]
    wanted = told(play([colocated(source, config())], asked))
    made = config(micro_batches=2, draft=f"model:{folder}:3")
    world = Phased(LocalCluster.build(source, made, attention=3, experts=2), 1, faulty=0.1, seed=3)
    lose_the_decoding_one(world, asked, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 4])
def test_expert_nodes_are_lost_in_mid_draft(seed, tiny_checkpoint, expected):
    folder = tiny_checkpoint("qwen3")
    source = ModelSource(str(folder), "q")
    world = test_lost_peer.World(
        seed, source, 32, 2, replicas=seed == 1, delay=seed, draft=f"model:{folder}:3"
    )
    assert collect(world.run()) == [said[:32] for said in expected("qwen3")]
    assert world.losses and sum(node.stats().drafts.accepted for node in world.cluster.attention)


def test_who_does_not_want_drafts_is_not_read(tiny_checkpoint, small, models):
    node = colocated(
        ModelSource(str(tiny_checkpoint("qwen3")), "q"), config(draft=f"model:{small('qwen3')}:3")
    )
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, draft=0)
    drive(node, requests(prompts(), params))
    assert not models[0]._texts and not node.stats().drafts.tokens


@pytest.mark.slow
def test_salts_share_no_text(tiny_checkpoint, small, models):
    """Whether a beginning is found is a matter of time, and nobody measures others' texts by it."""
    node = colocated(
        ModelSource(str(tiny_checkpoint("qwen3")), "q"), config(draft=f"model:{small('qwen3')}:3")
    )
    (model,), prompt = models, prompts((33,))[0]
    found = []
    for handle, salt in enumerate(("a", "b", "a")):
        drive(node, [GenerationRequest(handle, prompt, GREEDY, cache_salt=salt)])
        text = model.text_of(
            Sequence.start(
                GenerationRequest(9 + handle, prompt, GREEDY, cache_salt=salt), 9 + handle, frozenset()
            ),
            prompt,
        )
        other = model.text_of(
            Sequence.start(
                GenerationRequest(29 + handle, prompt, GREEDY, cache_salt="c"), 29 + handle, frozenset()
            ),
            prompt,
        )
        assert text is not None and other is not None
        found.append((text.read, other.read))
        for one in (text, other):
            model.forget(one.sequence)
    assert found == [(32, 0)] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "drafts"),
    [("a token beyond its vocabulary", 0), ("a number that is not finite", 0), ("an error", 0)],
)
def test_trouble_of_a_draft_model_is_nobody_elses(
    trouble, drafts, tiny_checkpoint, tmp_path, models, monkeypatch
):
    source, asked = ModelSource(str(tiny_checkpoint("qwen3")), "q"), requests(prompts())
    wanted = collect(drive(colocated(source, config()), asked))
    fields = {"vocab_size": 3} if trouble.startswith("a token") else {}
    folder = small_in(tmp_path / "small", "qwen3", **fields)
    node = colocated(source, config(draft=f"model:{folder}:3"))
    (model,) = models
    if trouble == "a number that is not finite":
        model._model._embed_VH.fill_(float("nan"))
    if trouble == "an error":
        monkeypatch.setattr(model, "read_on", lambda texts: 1 / 0)
    assert collect(drive(node, asked)) == wanted
    assert node.stats().drafts.tokens == drafts


WRONG: list[tuple[dict[str, Any], str, type[Exception]]] = [
    (
        {"model_type": "gemma3"},
        "model_type 'gemma3' is not supported; supported: llama, mistral",
        CheckpointError,
    ),
    ({"mlp_bias": True}, "mlp_bias: True is not supported", CheckpointError),
    ({"hidden_act": "gelu"}, "hidden_act: 'gelu'", CheckpointError),
    (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True}},
        "quantised",
        ConfigError,
    ),
    ({"intermediate_size": None}, "intermediate_size", CheckpointError),
]


@pytest.mark.parametrize(("fields", "said", "kind"), WRONG)
def test_what_cannot_draft_is_refused_by_name(fields, said, kind, small, tmp_path):
    import json

    own = json.loads((small("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(own | fields))
    with pytest.raises(kind, match=said):
        draft_model_spec(str(tmp_path))


def test_one_that_is_not_there_or_has_states_is_refused(tmp_path, tiny_checkpoint):
    with pytest.raises(ConfigError, match=r"--draft model: .*config.json: no such file"):
        draft_model_spec(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="recurrent states"):
        draft_model_spec(str(tiny_checkpoint("qwen3-next")))
