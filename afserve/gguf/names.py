"""Where a GGUF file has what a family asks for: our name of a tensor -> the stored one, and how it lies there.

Right in the table are llama.cpp's names of a layer (`gguf-py/gguf/constants.py`). Experts of a layer lie in one tensor,
the first dimension counts them. It reads no numbers.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from afserve.errors import CheckpointError
from afserve.families.pattern.naming import Naming, bias_of
from afserve.gguf.architectures import Architecture

_IN_LAYER = re.compile(r"blk\.(\d{1,9})\.(.+)")
_UNUSED = ("attn_rot_embd.weight", "nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
"""Tables that are computed here, and copies of embedding and head beside a layer of multi-token prediction."""
_PARTS = ("gate", "up", "down")
_DELTA = {
    "attn_qkv.weight": ("in_proj_qkv.weight", "keys"),
    "attn_gate.weight": ("in_proj_z.weight", "rows"),
    "ssm_beta.weight": ("in_proj_b.weight", "rows"),
    "ssm_alpha.weight": ("in_proj_a.weight", "rows"),
    "ssm_conv1d.weight": ("conv1d.weight", "keys"),
    "ssm_a": ("A_log", "rates"),
    "ssm_dt.bias": ("dt_bias", "rows"),
    "ssm_norm.weight": ("norm.weight", ""),
    "ssm_out.weight": ("out_proj.weight", "columns"),
}


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A stored tensor, or `expert`'s part of it. `beside`: what goes up from the latent to values, where it lies in
    another tensor than what goes up to keys. `change` is what llama.cpp has otherwise: `halves` of each head's rows are
    interleaved, a `norm` has one more. Of a gated delta net, value heads lie by their place within a key head's: in
    `rows`, in rows behind those of `keys`, in `columns`, and in the negative `rates`."""

    stored: str
    expert: int | None = None
    beside: str = ""
    change: str = ""


def pieces_of(
    stored: Collection[str], naming: Naming, known: Architecture, experts: int, where: str
) -> dict[str, TensorPiece]:
    """By our names. Raises CheckpointError for a tensor that is none of the architecture's: a model is not what it was
    trained to be without it."""
    ends = {
        "token_embd.weight": naming.embedding,
        "output_norm.weight": naming.final_norm,
        "output.weight": naming.head,
    }
    found: dict[str, TensorPiece] = {}
    for name in stored:
        match = _IN_LAYER.fullmatch(name)
        if match is None and name in ends:
            found[ends[name]] = TensorPiece(
                name, change="norm" if known.norms_more and "norm" in name else ""
            )
        elif match is None or not (placed := _in_layer(int(match[1]), match[2], naming, known, experts)):
            if match is None or match[2] not in _UNUSED:
                raise CheckpointError(
                    f"{where}: tensor {name} is none that afserve knows of {known.model_type} models, and without it "
                    "answers would be wrong; use a file that llama.cpp's convert_hf_to_gguf.py made without options"
                )
        else:
            found.update(placed)
    return found


def join_of_predictor(layer: int) -> str:
    """The stored tensor that a layer of multi-token prediction has alone."""
    return f"blk.{layer}.nextn.eh_proj.weight"


def _in_layer(
    layer: int, rest: str, naming: Naming, known: Architecture, experts: int
) -> Mapping[str, TensorPiece]:
    """All of our names for one stored tensor; none where it is not known."""
    stored = f"blk.{layer}.{rest}"
    stem, _, end = rest.rpartition(".")
    if stem.removeprefix("ffn_").removesuffix("_exps") in _PARTS and stem.endswith("_exps"):
        part = _PARTS.index(stem[4:-5])
        named = [naming.expert(layer, expert)[part] for expert in range(experts)]
        ours = named if end == "weight" else [bias_of(name) for name in named]
        return {name: TensorPiece(stored, expert) for expert, name in enumerate(ours)}
    if rest in _DELTA and known.norms_more:
        of_net, change = _DELTA[rest]
        return {naming.layer(layer, f"{naming.linear}.{of_net}"): TensorPiece(stored, change=change)}
    if rest == "exp_probs_b.bias":
        return {naming.router_bias(layer): TensorPiece(stored)}
    if rest == "attn_k_b.weight":
        joined = naming.layer(layer, f"{naming.attention}.kv_b_proj.weight")
        return {joined: TensorPiece(stored, beside=f"blk.{layer}.attn_v_b.weight")}
    if rest == "attn_v_b.weight":
        return {stored: TensorPiece(stored)}
    name = _plain(layer, naming, known).get(stem)
    if name is None or end not in ("weight", "bias"):
        return {}
    change = ""
    if known.turned and stem in ("attn_q", "attn_k"):
        change = "halves"
    elif known.norms_more and stem.endswith("norm"):
        change = "norm"
    return {(name if end == "weight" else bias_of(name)): TensorPiece(stored, change=change)}


def _plain(layer: int, naming: Naming, known: Architecture) -> dict[str, str]:
    """Stored names without their ending -> our names of weights."""
    attention = {
        "attn_q": "q_proj.weight",
        "attn_k": "k_proj.weight",
        "attn_v": "v_proj.weight",
        "attn_output": f"{naming.out}.weight",
        "attn_q_norm": naming.q_norm,
        "attn_k_norm": naming.k_norm,
        "attn_sinks": naming.sinks,
        "attn_q_a": "q_a_proj.weight",
        "attn_q_a_norm": "q_a_layernorm.weight",
        "attn_q_b": "q_b_proj.weight",
        "attn_kv_a_mqa": "kv_a_proj_with_mqa.weight",
        "attn_kv_a_norm": "kv_a_layernorm.weight",
        "attn_kv_b": "kv_b_proj.weight",
    }
    named = {stem: naming.layer(layer, f"{naming.attention}.{ours}") for stem, ours in attention.items()}
    named["attn_norm"] = naming.layer(layer, naming.input_norm)
    named[known.post_norm] = naming.layer(layer, naming.post_norm)
    named["ffn_gate_inp"] = naming.router(layer)
    named["ffn_gate_inp_shexp"] = naming.in_moe(layer, naming.shared_gate)
    dense, shared = naming.dense(layer), naming.shared_expert(layer)
    for part, of_dense, of_shared in zip(_PARTS, dense, shared, strict=True):
        named[f"ffn_{part}"], named[f"ffn_{part}_shexp"] = of_dense, of_shared
    if naming.predictor is not None:
        predictor = naming.predictor
        named["nextn.eh_proj"] = naming.of_predictor(layer, predictor.join)
        named["nextn.enorm"] = naming.of_predictor(layer, predictor.embedding_norm)
        named["nextn.hnorm"] = naming.of_predictor(layer, predictor.hidden_norm)
        named["nextn.shared_head_norm"] = naming.of_predictor(layer, predictor.last_norm)
    return named
