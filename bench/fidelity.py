"""`python -m bench.fidelity [--save]`: how far answers are from transformers' in float32, by what numbers are kept in.

Teacher-forced: every engine reads the same text, and at each position its whole distribution of the next token is
compared with the reference's. Perplexity is of the text (of the bundled model: held-out files; of tiny random models:
random tokens, where it means little), `agreement` the share of positions with the same most likely token, `kl` the mean
of sum p * (log p - log q) in nats, p the reference's. Nothing is timed and nothing is drawn: a row is the same on every
run of one instruction set. `--model FOLDER --texts FILE.json` measures another checkpoint; FILE has {name: text}.
`--families` measures a random checkpoint of each model type that transformers can build and afserve serves, those of
`tests/families/tiny.py`: of odd widths, with random norms and biases.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from afserve.comm.m2n.bank import LocalBankLink
from afserve.config import AUTO, ISAS, EngineConfig, ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, spec_of
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.errors import AfserveError
from afserve.kernels.isa import check_isa
from afserve.kernels.native import Native
from afserve.kernels.ops import Ops
from afserve.kernels.packed import PackedLinear
from afserve.kernels.pointwise import capped
from afserve.kernels.reference import Reference
from bench.origin import origin
from tests.families import ngrams
from tests.families.tiny import TINY as TINY_FAMILIES
from tests.families.tiny import build

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "fidelity.jsonl"
NANO = ROOT / "configs" / "nano"
_BEGIN, _BLOCK = 1, 16
_SIZES: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "initializer_range": 0.1, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_experts_per_tok": 2, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny qwen3_moe": ("Qwen3Moe", {**_SIZES, "num_experts": 8, "head_dim": 32}),
    "tiny mixtral": ("Mixtral", {**_SIZES, "num_local_experts": 4}),
    "tiny deepseek_v3": (
        "DeepseekV3",
        {**_SIZES, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16,
         "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "first_k_dense_replace": 1, "n_group": 2,
         "topk_group": 1, "n_shared_experts": 1},
    ),
    "tiny longcat_flash": (
        "LongcatFlash",
        {**{name: size for name, size in _SIZES.items() if name not in ("num_hidden_layers", "num_key_value_heads")},
         "num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "head_dim": 16, "kv_lora_rank": 32,
         "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8,
         "zero_expert_num": 4, "moe_topk": 3},
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kept:
    """What an engine computes in, and keeps in fewer bits."""

    dtype: str = "bfloat16"
    experts: str = "auto"
    dense: str = "auto"
    kv: str = "auto"


FORMATS = (
    Kept("float32"),
    Kept(),
    Kept(experts="int8"),
    Kept(experts="int4"),
    Kept(experts="int8", dense="int8"),
    Kept(experts="int4", dense="int4"),
    Kept("float32", kv="int8"),
    Kept("float32", kv="fp8"),
    Kept(kv="int8"),
    Kept(kv="fp8"),
    Kept(experts="int8", dense="int8", kv="int8"),
    Kept(experts="int4", dense="int4", kv="int8"),
)


@dataclass(frozen=True, slots=True)
class Texts:
    """A checkpoint and what it reads, as ids."""

    name: str
    folder: Path
    ids: list[list[int]]


OF_FAMILIES = tuple(
    kept for kept in FORMATS if kept.kv == "auto" or kept in (Kept(kv="int8"), Kept(kv="fp8"))
)


def bundled(folder: Path, name: str, files: Path, windows: int, length: int) -> Texts:
    """The first tokens of so many of the longest texts, each behind the token that begins one."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    named = json.loads(files.read_text(encoding="utf-8"))
    found = [tokenizer.encode(text, add_special_tokens=False).ids for text in named.values()]
    found.sort(key=len, reverse=True)
    return Texts(name, folder, [[_BEGIN, *ids[: length - 1]] for ids in found[:windows]])


def tiny(name: str, folder: Path, windows: int, length: int) -> Texts:
    """A random model, and random tokens."""
    kind, fields = TINY[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**fields))
    model.save_pretrained(folder)
    return _random(name, folder, windows, length)


def families(place: Path, only: Sequence[str], windows: int, length: int) -> Iterator[Texts]:
    """The first checkpoint of each model type, or those with these names."""
    seen = set[str]()
    for name, (family, _) in TINY_FAMILIES.items():
        if (name not in only) if only else (family in seen):
            continue
        seen.add(family)
        folder = build(name, place / name)
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
        yield _random(kind, folder, windows, length)


def _random(name: str, folder: Path, windows: int, length: int) -> Texts:
    dice = torch.Generator().manual_seed(1)
    return Texts(name, folder, torch.randint(3, 211, (windows, min(length, 200)), generator=dice).tolist())


def reference(texts: Texts) -> Iterator[Tensor]:
    """Of each text the log-probabilities of what follows each token but the last, (T, V)."""
    (kind,) = json.loads((texts.folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    model_class = getattr(transformers, kind, None) or getattr(ngrams, kind)  # which transformers has not
    model = model_class.from_pretrained(texts.folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for ids in texts.ids:
            yield model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)


class RecordingOps(Ops):
    """The kernels of an engine, which keep every row of logits that they give."""

    def __init__(self, backend: Reference, vocabulary: int) -> None:
        super().__init__(backend, torch.device("cpu"), 1)
        self._vocabulary, self._rows = vocabulary, list[Tensor]()

    def logits(self, x_TH: Tensor, packed: PackedLinear) -> Tensor:
        found = super().logits(x_TH, packed)
        if packed.outputs == self._vocabulary:
            self._rows.append(found.clone())
        return found

    def recorded(self) -> Tensor:
        """(T, V), what came since the last call."""
        rows_TV = torch.cat(self._rows)
        self._rows.clear()
        return rows_TV


def served(texts: Texts, kept: Kept, isa: str, vocabulary: int) -> Iterator[Tensor]:
    """The same of an engine, one text after the other."""
    room = max(map(len, texts.ids)) + _BLOCK
    config = EngineConfig(
        room, 2 * room // _BLOCK + 2, prefix_caching=False, micro_batches=1, draft="off", expert_dtype=kept.experts,
        dense_dtype=kept.dense, kv_dtype=kept.kv,
    )  # fmt: skip
    source = ModelSource(str(texts.folder), texts.name, dtype=kept.dtype)
    spec, ops = spec_of(source), RecordingOps(Native(1, "" if isa == AUTO else isa), vocabulary)
    held = [(layer, e, e) for layer in range(spec.moe_layers) for e in range(spec.experts)]
    bank = build_expert_bank(source, held, spec.experts, expert_dtype=kept.experts, ops=ops)
    node = build_attention_node(source, config, LocalBankLink(bank), ops=ops)
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    for number, ids in enumerate(texts.ids):
        node.submit(GenerationRequest(number, tuple(ids), asked))
        while node.busy:
            node.step()
        rows_TV, cap = ops.recorded()[: len(ids) - 1] * spec.around.logit_scale, spec.around.logit_cap
        yield (rows_TV if cap is None else capped(rows_TV, cap)).double().log_softmax(-1)


def compared(texts: Texts, truth: list[Tensor], kept: Kept, isa: str) -> dict[str, object]:
    """A row of results."""
    same = positions = 0
    kl = nats = true_nats = 0.0
    for ids, p_TV, q_TV in zip(texts.ids, truth, served(texts, kept, isa, truth[0].shape[1]), strict=True):
        following = torch.tensor(ids[1:])[:, None]
        positions += len(following)
        same += int((p_TV.argmax(-1) == q_TV.argmax(-1)).sum())
        kl += float(F.kl_div(q_TV, p_TV, reduction="sum", log_target=True))
        nats -= float(q_TV.gather(1, following).sum())
        true_nats -= float(p_TV.gather(1, following).sum())
    perplexity, true = math.exp(nats / positions), math.exp(true_nats / positions)
    return {
        "bench": "fidelity",
        "model": texts.name,
        **asdict(kept),
        "positions": positions,
        "perplexity": round(perplexity, 5),
        "reference_perplexity": round(true, 5),
        "perplexity_change": round(perplexity / true - 1, 6),
        "agreement": round(same / positions, 5),
        "kl": float(f"{kl / positions:.3g}"),
    }


def failed(texts: Texts, kept: Kept, why: Exception) -> dict[str, object]:
    """A row of what was not measured, with the reason."""
    said = f"{type(why).__name__}: {why}".splitlines()[0]
    return {"bench": "fidelity", "model": texts.name, **asdict(kept), "failed": said}


def measured(texts: Texts, formats: Iterable[Kept], isa: str) -> Iterator[dict[str, object]]:
    truth = list(reference(texts))
    for kept in formats:
        try:
            yield compared(texts, truth, kept, isa)
        except (AfserveError, ValueError, RuntimeError) as why:
            yield failed(texts, kept, why)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fidelity", description=__doc__.splitlines()[0])
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--model", type=Path, help="a folder; the bundled model and tiny ones without")
    asked.add_argument(
        "--families", nargs="*", metavar="NAME", help="a random checkpoint of each model type, or of these"
    )
    parser.add_argument("--texts", type=Path, help="with --model: a JSON file of {name: text}")
    parser.add_argument("--windows", type=int, default=3, help="texts")
    parser.add_argument("--length", type=int, default=256, help="tokens of each at most")
    parser.add_argument("--save", action="store_true", help="append the rows to bench/results/fidelity.jsonl")
    parser.add_argument("--isa", default=AUTO, choices=(AUTO, *ISAS), help="what afserve computes with")
    options = parser.parse_args()
    check_isa(options.isa)
    if (options.model is None) != (options.texts is None):
        parser.error("--model and --texts belong together")
    sizes, of_families = (options.windows, options.length), options.families is not None
    with tempfile.TemporaryDirectory() as place:
        if options.model is not None:
            every: Iterable[Texts] = [bundled(options.model, options.model.name, options.texts, *sizes)]
        elif of_families:
            every = families(Path(place), options.families, *sizes)
        else:
            every = [
                bundled(NANO, "nano", NANO / "heldout.json", *sizes),
                *(tiny(name, Path(place) / name.replace(" ", "-"), *sizes) for name in TINY),
            ]
        for texts in every:
            for row in measured(texts, OF_FAMILIES if of_families else FORMATS, options.isa):
                row |= {"family": True} if of_families else {}
                print(json.dumps(row), flush=True)
                if options.save:
                    with RESULTS.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({**row, **origin(options.isa)}) + "\n")


if __name__ == "__main__":
    main()
