"""Drafts by EAGLE-3 heads: those of a plain reference, in both layouts that heads have, and answers as without.

No head for a tiny model exists: these are random, so their drafts are nearly always wrong, and are compared as such.
"""

import json
import random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from afserve.config import EngineSettings, ModelSource
from afserve.drafts import DraftChoice
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import SamplingParams
from afserve.engine.step.stack_runner import StackRunner
from afserve.errors import CheckpointError, ConfigError, UserError
from afserve.families.table import load_spec
from afserve.launch.plan.drafting import planned_spec
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Wishes
from afserve.speculative_config import choice_of
from tests.conftest import TINY
from tests.engine.driving import GREEDY, collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.engine.phased import Phased
from tests.engine.pretended_devices import Devices, add_in_order, colocated_on
from tests.engine.test_drafted_answers import PLACES, answered, asked_of
from tests.families import tiny

H, VOCAB, DRAFTED, INNER, HEADS, GROUPS, SIZE, EPS = 48, 211, 90, 64, 4, 2, 16, 1e-5
LAYER = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "head_dim": SIZE, "vocab_size": VOCAB, "rms_norm_eps": EPS, "num_hidden_layers": 1,
    "rope_theta": 5000.0, "max_position_embeddings": 256,
}  # fmt: skip
SPECFORGE = {
    **LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 0], "use_aux_hidden_state": True},
}  # fmt: skip
SPECULATORS = {
    "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "transformer_layer_config": LAYER,
    "draft_vocab_size": DRAFTED, "eagle_aux_hidden_state_layer_ids": [0, 1, 2], "norm_before_residual": True,
}  # fmt: skip
QWEN3 = {
    **SPECULATORS, "transformer_layer_config": LAYER | {"model_type": "qwen3", "attention_bias": True},
    "norm_before_fc": True, "fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": None,
}  # fmt: skip
FORMS = {"specforge": SPECFORGE, "speculators": SPECULATORS, "qwen3": QWEN3}
BEHIND = {"specforge": (1, 2, 1), "speculators": (0, 1, 2), "qwen3": (2, 1, 0)}


def tensors_of(form):
    """Random ones; the norms, too. The head of speculators' form has an embedding of its own."""
    generator = torch.Generator().manual_seed(len(form))
    stem = "midlayer" if form == "specforge" else "layers.0"

    def drawn(*shape, around=0.0):
        return around + 0.15 * torch.randn(shape, generator=generator)

    wide = {"q": HEADS * SIZE, "k": GROUPS * SIZE, "v": GROUPS * SIZE}
    found = {f"{stem}.self_attn.{name}_proj.weight": drawn(n, 2 * H) for name, n in wide.items()}
    found |= {f"{stem}.self_attn.o_proj.weight": drawn(H, HEADS * SIZE), "fc.weight": drawn(H, 3 * H)}
    found |= {f"{stem}.mlp.{name}_proj.weight": drawn(INNER, H) for name in ("gate", "up")}
    found |= {f"{stem}.mlp.down_proj.weight": drawn(H, INNER), "lm_head.weight": drawn(DRAFTED, H)}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    found |= {f"{stem}.{name}.weight": drawn(H, around=1.0) for name in norms}
    found["norm.weight"] = drawn(H, around=1.0)
    if form == "speculators":
        found["embed_tokens.weight"] = drawn(VOCAB, H)
    if form == "qwen3":
        found |= {f"{stem}.self_attn.{name}_proj.bias": drawn(n) for name, n in {**wide, "o": H}.items()}
        found |= {f"{stem}.self_attn.{name}_norm.weight": drawn(SIZE, around=1.0) for name in "qk"}
        found |= {f"fc_norm.{at}.weight": drawn(H, around=1.0) for at in range(3)}
        found["input_norm.weight"] = drawn(3 * H, around=1.0)
    chosen = torch.randperm(VOCAB, generator=generator)[:DRAFTED].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[chosen] = True
    return found | {"d2t": chosen - torch.arange(DRAFTED), "t2d": t2d}


def head_in(folder, form, **fields):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FORMS[form] | fields))
    save_file(tensors_of(form), folder / "model.safetensors")
    return folder


def guesses_of(node):
    """What it drafts from now on: request, tokens so far, draft, confidence."""
    told, drafter = [], node._drafting._told[-1]
    guess = drafter.guess

    def noted(sequence, most):
        draft = guess(sequence, most)
        told.append((sequence.request.handle, [*sequence.tokens], [*draft.tokens], [*draft.confidence]))
        return draft

    drafter.guess = noted
    return told


class Reference:
    """A head in plain torch over whole texts, without a cache; the target is transformers' model."""

    def __init__(self, form, target):
        self.form, self.target, self.w = form, target, tensors_of(form)
        self.stem = "midlayer." if form == "specforge" else "layers.0."
        self.embedding = self.w.get("embed_tokens.weight", target.get_input_embeddings().weight)

    def norm(self, x, weight):
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight

    def linear(self, name, x):
        return torch.nn.functional.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def draft(self, tokens, count):
        with torch.no_grad():
            seen = self.target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            seen = [seen[layers][0] for layers in BEHIND[self.form]]
            if self.form == "qwen3":
                seen = [self.norm(x, self.w[f"fc_norm.{at}.weight"]) for at, x in enumerate(seen)]
                joined = self.norm(torch.cat(seen, 1), self.w["input_norm.weight"])
            else:
                joined = torch.cat(seen, 1)
            hidden, following, drafted = self.linear("fc", joined), [*tokens[1:]], []
            for _ in range(count):
                out = self.layer(hidden, self.embedding[torch.tensor(following)])
                normed = self.norm(out, self.w["norm.weight"])
                best = int(self.linear("lm_head", normed)[-1].argmax())
                drafted.append(best + int(self.w["d2t"][best]))
                following.append(drafted[-1])
                fed = normed if self.form == "qwen3" else out
                hidden = torch.cat((hidden, fed[-1:]))
        return drafted

    def layer(self, hidden, embedded):
        stem, rows = self.stem, len(hidden)
        normed = self.norm(hidden, self.w[f"{stem}hidden_norm.weight"])
        both = torch.cat((self.norm(embedded, self.w[f"{stem}input_layernorm.weight"]), normed), 1)
        q, k, v = (self.linear(f"{stem}self_attn.{name}_proj", both).view(rows, -1, SIZE) for name in "qkv")
        if self.form == "qwen3":
            q, k = (self.norm(x, self.w[f"{stem}self_attn.{n}_norm.weight"]) for n, x in (("q", q), ("k", k)))
        q, k = self.turned(q), self.turned(k).repeat_interleave(HEADS // GROUPS, 1)
        scores = torch.einsum("tad,sad->ats", q, k) * SIZE**-0.5
        scores = scores.masked_fill(~torch.ones(rows, rows, dtype=torch.bool).tril(), float("-inf"))
        seen = torch.einsum("ats,sad->tad", scores.softmax(-1), v.repeat_interleave(HEADS // GROUPS, 1))
        x = hidden if self.form == "specforge" or "norm_before_residual" not in FORMS[self.form] else normed
        x = x + self.linear(f"{stem}self_attn.o_proj", seen.flatten(1))
        post = self.norm(x, self.w[f"{stem}post_attention_layernorm.weight"])
        gate, up = (self.linear(f"{stem}mlp.{name}_proj", post) for name in ("gate", "up"))
        return x + self.linear(f"{stem}mlp.down_proj", torch.nn.functional.silu(gate) * up)

    def turned(self, x):
        angle = torch.arange(len(x))[:, None] / 5000.0 ** (torch.arange(0, SIZE, 2) / SIZE)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


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
    node = colocated(source, config(max_batch_tokens=16, draft=f"eagle3:{head}:4"))
    told = guesses_of(node)
    assert collect(drive(node, asked)) == wanted
    drafts = node.stats().drafts
    assert drafts.drafters.eagle3.tokens == drafts.tokens > 100
    check(told, Reference(form, oracle("qwen3")))


def check(told, reference):
    assert len(told) > 60 and sum(len(drafted) == 4 for _, _, drafted, _ in told) > 0.7 * len(told)
    assert all(0 < p <= 1 for *_, sure in told for p in sure)
    for _, tokens, drafted, _ in random.Random(3).sample(told, 40):
        assert drafted == reference.draft(tokens, len(drafted))


@pytest.mark.slow
def test_what_was_right_is_gone_on_with(tiny_checkpoint, oracle, tmp_path):
    """A head that knows three tokens, and answers of no others: some of what it drafts is right."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    head = head_in(tmp_path / "head", "specforge", draft_vocab_size=3)
    tensors, reference = tensors_of("specforge"), Reference("specforge", oracle("qwen3"))
    known = [20, 100, 180]
    few = {
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
    node = colocated(source, config(draft=f"eagle3:{head}:4"))
    told = guesses_of(node)
    assert collect(drive(node, asked)) == wanted
    drafts = node.stats().drafts
    assert drafts.accepted > 20 and drafts.positions.p2 > 0
    check(told, reference)


@pytest.mark.parametrize("place", PLACES)
def test_all_is_told_as_without_drafts(place, tiny_checkpoint, tmp_path):
    """Of requests of all kinds, in a cache that is too small for them: some are preempted in mid-draft."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    head = head_in(tmp_path / "head", "speculators")
    asked = asked_of(random.Random(5), 24)
    plain = answered(source, place, asked, kv_blocks=26, max_batch_tokens=24)
    drafted = answered(source, place, asked, f"eagle3:{head}:3", kv_blocks=26, max_batch_tokens=24)
    assert drafted == plain


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
    head = head_in(tmp_path / "head", "specforge")
    asked = asked_of(random.Random(8), 10)
    for place in ("colocated", "1x1"):
        plain = answered(source, place, asked, **fields)
        assert answered(source, place, asked, f"eagle3:{head}:3", **fields) == plain


@pytest.mark.slow
def test_what_was_found_or_handed_over_is_drafted_for_as_well(tiny_checkpoint, tmp_path):
    """The head's keys of a prompt come with its blocks: the same tokens are drafted there."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    made = config(draft=f"eagle3:{head_in(tmp_path / 'head', 'specforge')}:3")
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


WRONG: list[tuple[dict[str, Any], str]] = [
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
]


@pytest.mark.parametrize(("fields", "told"), WRONG, ids=["/".join(fields) for fields, _ in WRONG])
def test_a_head_that_does_not_fit_is_refused_before_anything_runs(fields, told, tiny_checkpoint, tmp_path):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    refused(source, head_in(tmp_path / "head", "specforge", **fields), told)


def refused(source, head, told):
    with pytest.raises(UserError, match=told) as refusal:
        planned_spec(source, DraftChoice.parse(f"eagle3:{head}"))
    assert refusal.value.exit_code == 2


def test_what_is_not_there_is_refused_before_anything_runs(tiny_checkpoint, tmp_path):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    refused(source, tmp_path / "nowhere", "nowhere/config.json: no such file; an EAGLE-3 head is a folder")
    head = head_in(tmp_path / "head", "specforge")
    assert planned_spec(source, DraftChoice.parse(f"eagle3:{head}")) == load_spec(source.path)
    tensors = tensors_of("specforge")
    for name in ("midlayer.self_attn.q_proj.bias", "input_norm.weight"):
        save_file(tensors | {name: torch.zeros(3)}, head / "model.safetensors")
        refused(source, head, f"{name} is there, and no field of config.json asks for it")
    for name in ("fc.weight", "midlayer.hidden_norm.weight", "d2t"):
        save_file({each: one for each, one in tensors.items() if each != name}, head / "model.safetensors")
        refused(source, head, f"no {name}")
    (head / "model.safetensors").unlink()
    refused(source, head, "model.safetensors")


def test_tokens_beyond_the_vocabulary_are_refused_when_they_are_read(tiny_checkpoint, tmp_path):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    head = head_in(tmp_path / "head", "specforge")
    tensors = tensors_of("specforge")
    tensors["d2t"][-1] = VOCAB
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"d2t names tokens from . to 300, the model has 211"):
        colocated(source, config(draft=f"eagle3:{head}"))


@pytest.mark.parametrize(
    ("text", "head", "tokens"),
    [("eagle3:/a/b", "/a/b", None), ("eagle3:/a/b:4", "/a/b", 4), ("eagle3:/a:b", "/a:b", None),
     ("eagle3:/a:7:2", "/a:7", 2)],
)  # fmt: skip
def test_a_folder_stands_behind_the_method(text, head, tokens):
    choice = DraftChoice.parse(text)
    assert (choice.head, choice.tokens, str(choice)) == (head, tokens, text)
    words = {"method": "eagle3", "model": head} | ({"num_speculative_tokens": tokens} if tokens else {})
    assert choice_of(json.dumps(words)) == choice


@pytest.mark.parametrize("text", ["eagle3", "eagle3:", "eagle3:/a:0", "eagle3:/a:17"])
def test_a_head_without_a_folder_or_with_too_many_tokens_is_refused(text):
    with pytest.raises(ConfigError, match=r"eagle3:FOLDER:N|from 1 to 16"):
        DraftChoice.parse(text)


def test_steps_of_several_calls_draft_what_steps_layer_by_layer_do(tiny_checkpoint, tmp_path, monkeypatch):
    """And say in which layer a row was spoiled."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    made = config(draft=f"eagle3:{head_in(tmp_path / 'head', 'specforge')}:2")
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


def test_its_memory_is_planned_with(tiny_checkpoint, tmp_path):
    """Weights on attention nodes, and one more layer in every block; nothing on expert nodes."""
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    head, spec = head_in(tmp_path / "head", "speculators"), load_spec(source.path)
    machine = Machine(8, 8 << 30, 16 << 30)

    def chosen(draft):
        wishes = Wishes(1, 2, kv_tokens=1600, engine=EngineSettings(draft=draft))
        return choose(planned_spec(source, DraftChoice.parse(draft)), source, machine, wishes)

    plain, drafting = chosen("off"), chosen(f"eagle3:{head}")
    stored = sum(x.numel() for name, x in tensors_of("speculators").items() if name not in ("d2t", "t2d"))
    assert drafting.attention.weights - plain.attention.weights == 4 * stored
    assert drafting.attention.kv - plain.attention.kv == 4 * 2 * GROUPS * SIZE * 1600
    assert drafting.expert == plain.expert and drafting.spec == spec
    assert drafting.picked["draft"] == f"eagle3 of {head}, as many tokens a step as pay"
    node = colocated(source, config(draft=f"eagle3:{head}"))
    assert node.kv.block_bytes == 8 * (4 * 2 * GROUPS * SIZE + spec.kv_bytes_per_token(4))


def test_caches_of_other_heads_share_no_blocks(tiny_checkpoint, tmp_path):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    heads = [head_in(tmp_path / str(number), "specforge") for number in range(3)]
    tensors = tensors_of("specforge")
    tensors["norm.weight"][0] += 1.0
    save_file(tensors, heads[2] / "model.safetensors")
    found = [colocated(source, config(draft=f"eagle3:{head}")).kv.fingerprint for head in heads]
    assert found[0] == found[1] != found[2]


def test_a_node_of_several_devices_has_the_head_on_its_first(tiny_checkpoint, tmp_path):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "q")
    made = config(draft=f"eagle3:{head_in(tmp_path / 'head', 'specforge')}:2")
    asked = requests(prompts((9, 30)))
    plain, node = colocated(source, made), colocated_on(Devices(2, add_in_order), source, made)
    told, wanted = guesses_of(node), guesses_of(plain)
    assert collect(drive(node, asked)) == collect(drive(plain, asked))
    assert [guess[:3] for guess in told] == [guess[:3] for guess in wanted] and len(told) > 60
