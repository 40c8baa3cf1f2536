"""Heads beside a tiny Qwen3-MoE: random ones in every layout that heads have, and plain references of them in torch.

No head for a tiny model exists: these are random, so their drafts are nearly always wrong, and are compared as such.
"""

import json
import random

import pytest
import torch
from safetensors.torch import save_file

H, VOCAB, DRAFTED, INNER, HEADS, GROUPS, SIZE, EPS = 48, 211, 90, 64, 4, 2, 16, 1e-5
LAYER = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "head_dim": SIZE, "vocab_size": VOCAB, "rms_norm_eps": EPS, "num_hidden_layers": 1,
    "rope_theta": 5000.0, "max_position_embeddings": 256,
}  # fmt: skip
EAGLES = {
    "specforge": {
        **LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 0], "use_aux_hidden_state": True},
    },
    "speculators": {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "transformer_layer_config": LAYER,
        "draft_vocab_size": DRAFTED, "eagle_aux_hidden_state_layer_ids": [0, 1, 2], "norm_before_residual": True,
    },
}  # fmt: skip
EAGLES["qwen3"] = {
    **EAGLES["speculators"], "transformer_layer_config": LAYER | {"model_type": "qwen3", "attention_bias": True},
    "norm_before_fc": True, "fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": None,
}  # fmt: skip
BLOCK, MASK, RANK = 5, 7, 8
QWEN = LAYER | {"model_type": "qwen3", "num_hidden_layers": 2}
FLASHES = {
    "z-lab": {
        **QWEN, "architectures": ["DFlashDraftModel"], "block_size": BLOCK, "num_target_layers": 3,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]}, "layer_types": ["full_attention"] * 2,
    },
    "flash of speculators": {
        "speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "draft_vocab_size": DRAFTED,
        "transformer_layer_config": QWEN | {"attention_bias": True}, "block_size": BLOCK, "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [0, 2, 1],
    },
    "windows": {
        **QWEN, "architectures": ["DFlashDraftModel"], "layer_types": ["sliding_attention", "full_attention"],
        "dflash_config": {"mask_token_id": MASK, "block_size": BLOCK}, "sliding_window": 12, "use_sliding_window": True,
        "input_embedding_scale": 3.0,
    },
}  # fmt: skip
FLASHES["last layer"] = FLASHES["z-lab"] | {
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [2, 0]},
}
FLASHES["causal"] = FLASHES["z-lab"] | {
    "is_causal": True,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}
FLASHES["newest first"] = FLASHES["flash of speculators"] | {
    "sample_from_anchor": True,
    "block_size": BLOCK - 1,
}
SPARK = FLASHES["flash of speculators"] | {"speculators_model_type": "dspark", "markov_rank": RANK}
FLASHES["dspark"] = SPARK | {"block_size": BLOCK - 1}
FLASHES["dspark of masks"] = SPARK | {"sample_from_anchor": False, "enable_confidence_head": False}
FORMS = EAGLES | FLASHES
BEHIND = {
    "specforge": (1, 2, 1), "speculators": (0, 1, 2), "qwen3": (2, 1, 0), "z-lab": (1, 2), "windows": (2, 1),
    "last layer": (3, 1), "causal": (1, 2),
    **dict.fromkeys(("flash of speculators", "newest first", "dspark", "dspark of masks"), (0, 2, 1)),
}  # fmt: skip
METHOD = {
    form: "eagle3" if form in EAGLES else form.split()[0] if "dspark" in form else "dflash" for form in FORMS
}
BIASED = ("flash of speculators", "newest first", "dspark", "dspark of masks")
OWN_ENDS = ("speculators", *BIASED)


def tensors_of(form):
    """Random ones; the norms, too. Some have an embedding, and a vocabulary, of their own."""
    generator = torch.Generator().manual_seed(len(form))
    eagle, biased = form in EAGLES, form in ("qwen3", *BIASED)
    stems = ["midlayer"] if form == "specforge" else ["layers.0"] if eagle else ["layers.0", "layers.1"]

    def drawn(*shape, around=0.0):
        return around + 0.15 * torch.randn(shape, generator=generator)

    wide, read = {"q": HEADS * SIZE, "k": GROUPS * SIZE, "v": GROUPS * SIZE}, len(BEHIND[form]) * H
    found = {"fc.weight": drawn(H, read), "norm.weight": drawn(H, around=1.0)}
    for stem in stems:
        across = 2 * H if eagle else H
        found |= {f"{stem}.self_attn.{name}_proj.weight": drawn(n, across) for name, n in wide.items()}
        found |= {f"{stem}.self_attn.o_proj.weight": drawn(H, HEADS * SIZE)}
        found |= {f"{stem}.mlp.{name}_proj.weight": drawn(INNER, H) for name in ("gate", "up")}
        found |= {f"{stem}.mlp.down_proj.weight": drawn(H, INNER)}
        norms = ("input_layernorm", "post_attention_layernorm")
        found |= {f"{stem}.{name}.weight": drawn(H, around=1.0) for name in norms}
        if biased:
            found |= {f"{stem}.self_attn.{name}_proj.bias": drawn(n) for name, n in {**wide, "o": H}.items()}
        if not eagle or form == "qwen3":
            found |= {f"{stem}.self_attn.{name}_norm.weight": drawn(SIZE, around=1.0) for name in "qk"}
    found[f"{stems[0]}.hidden_norm.weight" if eagle else "hidden_norm.weight"] = drawn(H, around=1.0)
    if form in OWN_ENDS:
        found["embed_tokens.weight"] = drawn(VOCAB, H)
    if form == "qwen3":
        found |= {f"fc_norm.{at}.weight": drawn(H, around=1.0) for at in range(3)}
        found["input_norm.weight"] = drawn(3 * H, around=1.0)
    if not eagle and form not in OWN_ENDS:
        return found
    found["lm_head.weight"] = drawn(DRAFTED, H)
    if METHOD[form] == "dspark":
        found["markov_head.markov_w1.weight"] = drawn(VOCAB, RANK)
        found["markov_head.markov_w2.weight"] = 9 * drawn(DRAFTED, RANK)
    if form == "dspark":
        found |= {"confidence_head.proj.weight": drawn(1, H + RANK), "confidence_head.proj.bias": drawn(1)}
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


def check(told, reference):
    assert len(told) > 60 and sum(len(drafted) == 4 for _, _, drafted, _ in told) > 0.7 * len(told)
    assert all(0 < p <= 1 for *_, sure in told for p in sure)
    for _, tokens, drafted, sure in random.Random(3).sample(told, 40):
        wanted, chances = reference.draft(tokens, len(drafted))
        assert drafted == wanted and sure == pytest.approx(chances, rel=2e-3)


class Reference:
    """A head in plain torch over whole texts, without a cache; the target is transformers' model."""

    def __init__(self, form, target):
        self.form, self.target, self.w = form, target, tensors_of(form)
        self.embedding = self.w.get("embed_tokens.weight", target.get_input_embeddings().weight)

    def draft(self, tokens, count):
        """Tokens, and how likely each is."""
        with torch.no_grad():
            seen = self.target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            seen = [seen[layers][0] for layers in BEHIND[self.form]]
            guesses = self.eagle(seen, tokens, count) if self.form in EAGLES else self.flash(seen, tokens)
            return [token for token, _ in guesses[:count]], [chance for _, chance in guesses[:count]]

    def eagle(self, seen, tokens, count):
        stem = "midlayer." if self.form == "specforge" else "layers.0."
        if self.form == "qwen3":
            seen = [self.norm(x, self.w[f"fc_norm.{at}.weight"]) for at, x in enumerate(seen)]
            joined = self.norm(torch.cat(seen, 1), self.w["input_norm.weight"])
        else:
            joined = torch.cat(seen, 1)
        hidden, following, drafted = self.linear("fc", joined), [*tokens[1:]], []
        for _ in range(count):
            embedded = self.embedding[torch.tensor(following)]
            normed = self.norm(hidden, self.w[f"{stem}hidden_norm.weight"])
            both = torch.cat((self.norm(embedded, self.w[f"{stem}input_layernorm.weight"]), normed), 1)
            rows = len(hidden)
            x = normed if FORMS[self.form].get("norm_before_residual") else hidden
            out = self.layer(stem, x, both, both[:0], torch.ones(rows, rows, dtype=torch.bool).tril())
            normed = self.norm(out, self.w["norm.weight"])
            drafted += self.likeliest(normed[-1:])
            following.append(drafted[-1][0])
            fed = normed if self.form == "qwen3" else out
            hidden = torch.cat((hidden, fed[-1:]))
        return drafted

    def flash(self, seen, tokens):
        """All places of a block: the newest token, and masks."""
        first = self.form in ("newest first", "dspark")
        block = BLOCK - 1 if first else BLOCK
        context = self.norm(self.linear("fc", torch.cat(seen, 1)), self.w["hidden_norm.weight"])
        x = self.embedding[torch.tensor([tokens[-1]] + [MASK] * (block - 1))]
        x = x * FORMS[self.form].get("input_embedding_scale", 1.0)
        for layer in range(2):
            stem = f"layers.{layer}."
            sees = torch.ones(block, len(context) + block, dtype=torch.bool)
            if self.form == "causal":
                sees = sees.tril(len(context))
            if self.form == "windows" and not layer:
                sees = sees.tril(len(context)) & ~sees.tril(len(context) - 12)
            x = self.layer(stem, x, self.norm(x, self.w[f"{stem}input_layernorm.weight"]), context, sees)
        rows = self.norm(x, self.w["norm.weight"])[0 if first else 1 :]
        return self.likeliest(rows) if METHOD[self.form] == "dflash" else self.spark(rows, tokens[-1])

    def spark(self, rows, before):
        """Each place knows the token before it."""
        found = []
        for row in rows:
            made = self.w["markov_head.markov_w1.weight"][before]
            ((before, chance),) = self.likeliest(row[None], self.w["markov_head.markov_w2.weight"] @ made)
            if self.form == "dspark":
                chance = float(self.linear("confidence_head.proj", torch.cat((row, made))).sigmoid())
            found.append((before, chance))
        return found

    def layer(self, stem, x, read, context, sees):
        """Of rows that see, of a context before them and themselves, what `sees` says."""
        heads = {
            name: self.linear(f"{stem}self_attn.{name}_proj", read).view(len(x), -1, SIZE) for name in "qkv"
        }
        for name in "kv":
            kept = self.linear(f"{stem}self_attn.{name}_proj", context).view(-1, GROUPS, SIZE)
            heads[name] = torch.cat((kept, heads[name]))
        if f"{stem}self_attn.q_norm.weight" in self.w:
            heads |= {
                name: self.norm(heads[name], self.w[f"{stem}self_attn.{name}_norm.weight"]) for name in "qk"
            }
        q = self.turned(heads["q"], len(context))
        k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (self.turned(heads["k"], 0), heads["v"]))
        scores = torch.einsum("tad,sad->ats", q, k) * SIZE**-0.5
        seen = torch.einsum("ats,sad->tad", scores.masked_fill(~sees, float("-inf")).softmax(-1), v)
        x = x + self.linear(f"{stem}self_attn.o_proj", seen.flatten(1))
        post = self.norm(x, self.w[f"{stem}post_attention_layernorm.weight"])
        gate, up = (self.linear(f"{stem}mlp.{name}_proj", post) for name in ("gate", "up"))
        return x + self.linear(f"{stem}mlp.down_proj", torch.nn.functional.silu(gate) * up)

    def likeliest(self, normed, more=0.0):
        weight = self.w.get("lm_head.weight", self.target.get_output_embeddings().weight)
        chances, best = (normed @ weight.T + more).softmax(1).max(1)
        tokens = best + self.w["d2t"][best] if "d2t" in self.w else best
        return [*zip(tokens.tolist(), chances.tolist(), strict=True)]

    def norm(self, x, weight):
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight

    def linear(self, name, x):
        return torch.nn.functional.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def turned(self, x, first):
        place = torch.arange(first, first + len(x))[:, None] / (2.0 if self.form == "causal" else 1.0)
        angle = place / 5000.0 ** (torch.arange(0, SIZE, 2) / SIZE)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
