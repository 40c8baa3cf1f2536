"""The model card, rendered from what training and the report measured. Knows no tensor."""

import json
from pathlib import Path
from typing import Any

from bench.nano.shape import Recipe, Shape

TEMPLATE = Path(__file__).with_name("card.md")


def write(folder: Path) -> None:
    """Write README.md from training.json and config.json."""
    facts = json.loads((folder / "training.json").read_text())
    shape = Shape()
    values = _shape(shape) | _training(facts) | _facts(facts["facts"]) | _drafts(facts["drafts"])
    values |= _held_out(facts, shape) | _answers(facts["answers"])
    (folder / "README.md").write_text(TEMPLATE.read_text().format(**values))


def _shape(s: Shape) -> dict[str, Any]:
    names = "layers dense_inter heads q_rank kv_rank nope rope value experts expert_inter shared top_k groups"
    values = {name: getattr(s, name) for name in f"{names} top_groups scale vocab positions".split()}
    return values | {"dense": s.dense_layers, "sparse": s.layers - s.dense_layers, "active": _active(s) / 1e6}


def _active(s: Shape) -> int:
    """Parameters that take part in one token, without norms and without the embedding table."""
    attention = s.hidden * (s.q_rank + s.kv_rank + s.rope + s.heads * s.value)
    attention += s.q_rank * s.heads * s.head_dim + s.kv_rank * s.heads * (s.nope + s.value)
    moe = (s.top_k + s.shared) * 3 * s.hidden * s.expert_inter + s.experts * s.hidden
    dense = 3 * s.hidden * s.dense_inter
    return (
        s.layers * attention + (s.layers - s.dense_layers) * moe + s.dense_layers * dense + s.vocab * s.hidden
    )


def _training(facts: dict[str, Any]) -> dict[str, Any]:
    recipe, total = facts["recipe"], facts["recipe"]["steps"] * facts["recipe"]["tokens"]
    names = "seed steps muon_lr embed_lr head_lr small_lr mtp_weight bias_step muon_decay decay_from"
    return {name: recipe[name] for name in names.split()} | {
        "tokens_per_step": recipe["tokens"],
        "total": total / 1e6,
        "epochs": total / (facts["text_tokens"] + facts["dialogue_tokens"]),
        "rates": _rates(recipe),
        "low": recipe["band"][0],
        "high": recipe["band"][1],
        "lengths": ", ".join(str(phase.length) for phase in Recipe().phases),
        "cpu_minutes": facts["cpu_minutes"],
        "torch": facts["torch"],
        "pieces": _pieces(facts),
        "python": facts["python"],
        "train_files": facts["files"],
        "train_megabytes": facts["bytes"] / 1e6,
        "text_tokens": facts["text_tokens"] / 1e6,
        "dialogues": facts["dialogues"],
        "dialogue_tokens": facts["dialogue_tokens"] / 1e6,
        "fingerprint": facts["fingerprint"],
    }


def _rates(recipe: dict[str, Any]) -> str:
    return ", ".join(f"{level:g} at {max(step, 0):,}" for step, level in recipe["rates"])


def _pieces(stage: dict[str, Any]) -> str:
    return f"stopped and resumed at step {stage['resumed_at']}" if "resumed_at" in stage else "in one piece"


def _facts(stage: dict[str, Any]) -> dict[str, Any]:
    recipe = stage["recipe"]
    return {
        "functions": stage["count"],
        "wordings": stage["wordings"],
        "fact_steps": recipe["steps"],
        "fact_seed": recipe["seed"],
        "fact_tokens": recipe["tokens"],
        "fact_shares": _shares(recipe),
        "fact_length": recipe["lesson_length"],
        "fact_rates": _rates(recipe),
        "fact_minutes": stage["cpu_minutes"],
        "fact_pieces": _pieces(stage),
    }


def _shares(recipe: dict[str, Any]) -> str:
    phases = recipe["phases"]
    if len({phase["taught"] for phase in phases}) == 1:
        return f"{phases[0]['taught']:.0%}"
    return ", ".join(f"{phase['taught']:.0%} for {phase['share']:.0%} of the steps" for phase in phases)


def _drafts(stage: dict[str, Any]) -> dict[str, Any]:
    recipe = stage["recipe"]
    return {
        "draft_passes": recipe["chain"],
        "draft_steps": recipe["steps"],
        "draft_seed": recipe["seed"],
        "draft_tokens": recipe["tokens"],
        "draft_shares": _shares(recipe),
        "draft_rates": _rates(recipe),
        "draft_minutes": stage["cpu_minutes"],
        "draft_pieces": _pieces(stage),
        "agreement_before": stage["mtp_agreement_before"],
    }


def _answers(found: dict[str, Any]) -> dict[str, Any]:
    rows = [f'| "{wording.format("NAME")}" | {share:.1%} |' for wording, share in found["exact"].items()]
    return {
        "asked": found["asked"],
        "asked_seed": found["seed"],
        "exact": next(iter(found["exact"].values())),
        "answer_rows": "\n".join(rows),
    }


def _few_bits(facts: dict[str, Any]) -> str:
    """A row of the table, where `bench.nano.bits` has measured it."""
    found = facts.get("expert_bits")
    if found is None:
        return ""
    kept = [
        f"{name} {cost['bits_per_byte']:.4f} (perplexity {cost['perplexity']:.3f} a token"
        + (f", weights off by {cost['weight_error']:.1%})" if cost["weight_error"] else ")")
        for name, cost in found.items()
    ]
    kinds = "what experts, or all linear maps (everywhere), are kept in"
    return f"| bits per byte of the sample as served, by {kinds} | {'; '.join(kept)} |\n"


def _held_out(facts: dict[str, Any], shape: Shape) -> dict[str, Any]:
    held = facts["held_out"]
    layers = [*range(shape.dense_layers, shape.layers), "MTP"]
    rows = zip(layers, held["largest_share"], held["smallest_share"], strict=True)
    return {
        "megabytes": facts["megabytes"],
        "parameters": facts["parameters"] / 1e6,
        "bits": held["bits_per_byte"],
        "sample_bits": facts["sample"]["bits_per_byte"],
        "files": facts["held_out_files"],
        "kilobytes": held["bytes"] / 1e3,
        "xz": facts["xz_bits_per_byte"],
        "bytes_per_token": held["bytes"] / held["tokens"],
        "top1": held["top1"],
        "few_bits": _few_bits(facts),
        "agreement": held["mtp_agreement"],
        "sample_agreement": facts["sample"]["mtp_agreement"],
        "mtp_top1": held["mtp_top1"],
        "routing": "\n".join(f"| {layer} | {high:.2f} | {low:.3f} |" for layer, high, low in rows),
        "sample_tokens": facts["sample_tokens"],
        "samples": "\n\n".join(f"````text\n{text}\n````" for text in facts["samples"]),
    }
