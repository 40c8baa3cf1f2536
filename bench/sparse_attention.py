"""Sparse attention beside full attention: a long prompt and the tokens behind it, with an indexer and without.

    python -m bench.sparse_attention --save
    python -m bench.sparse_attention --tokens 4096 --turns 1

Two models of random weights with the attention of DeepSeek-V3.2, 16 heads of it, and hardly anything else: one has its
indexer (2,048 rows of all, index keys of 128), the other attends all rows. In each turn both compute the same prompt in
the native kernels, one after the other, and then some tokens; ratios are of neighbours.
"""

import argparse
import json
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from afserve.comm.m2n.bank import LocalTicket
from afserve.config import EngineConfig, ModelSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "sparse_attention.jsonl"
NEW, BLOCK, STEP = 17, 16, 512
SHAPE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 4096,
    "q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "torch_dtype": "bfloat16",
}  # fmt: skip
INDEXER = {"index_n_heads": 16, "index_head_dim": 128, "index_topk": 2048}
KINDS = {"sparse": {"model_type": "deepseek_v32", **INDEXER}, "full": {"model_type": "deepseek_v3"}}


def node_of(folder: Path, kind: str, tokens: int, threads: int, layers: int) -> AttentionNode[LocalTicket]:
    """A model of this kind over a cache that holds one prompt and its answer."""
    longest = tokens + NEW
    (folder / kind).mkdir()
    config = {**SHAPE, **KINDS[kind], "max_position_embeddings": longest, "num_hidden_layers": layers}
    (folder / kind / "config.json").write_text(json.dumps(config))
    source = ModelSource(str(folder / kind), kind, load_format="dummy")
    blocks = 2 + longest // BLOCK
    asked = EngineConfig(
        max_model_len=longest, kv_blocks=blocks, block_size=BLOCK, max_batch_tokens=STEP, micro_batches=1,
        threads=threads, prefill_tokens=STEP,
    )  # fmt: skip
    return colocated(source, asked)


def seconds(node: AttentionNode[LocalTicket], handle: int, prompt: tuple[int, ...]) -> tuple[float, float]:
    """Of the prompt, to its first token; and of each token behind it, the median."""
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    node.submit(GenerationRequest(handle, prompt, params))
    at: list[float] = []
    while node.busy:
        if any(event.token_ids for event in node.step()):
            at.append(time.perf_counter())
    return at[0] - begin, median(after - before for before, after in pairwise(at))


def measure(tokens: int, turns: int, threads: int, layers: int) -> dict[str, object]:
    """Each turn has a prompt of its own, so that none is found in the cache."""
    draw = random.Random(5)
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        nodes = {kind: node_of(Path(folder), kind, tokens, threads, layers) for kind in KINDS}
        for turn in range(turns):
            prompt = tuple(draw.randrange(3, SHAPE["vocab_size"]) for _ in range(tokens))
            for kind, node in nodes.items():
                found[kind].append(seconds(node, turn, prompt))
    row: dict[str, object] = {"tokens": tokens, "threads": threads, "turns": turns, "layers": layers}
    for part, name in enumerate(("prompt", "token")):
        sparse, full = ([one[part] for one in found[kind]] for kind in ("sparse", "full"))
        ratios = sorted(one / other for one, other in zip(sparse, full, strict=True))
        row |= {f"{name}_s": median(sparse), f"{name}_full_s": median(full), f"{name}_ratio": median(ratios)}
        row |= {f"{name}_spread": [ratios[0], ratios[-1]]}
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768], help="of the prompts")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="of both models")
    parser.add_argument("--save", action="store_true", help=f"append the rows to {OUT.relative_to(ROOT)}")
    args = parser.parse_args()
    for tokens in args.tokens:
        row = origin() | measure(tokens, args.turns, args.threads, args.layers)
        print(json.dumps(row), flush=True)
        if args.save:
            with OUT.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
