"""Sparse attention beside full attention: a long prompt and the tokens behind it, with an indexer and without.

    python -m bench.sparse_attention --save
    python -m bench.sparse_attention --tokens 4096 --turns 1
    python -m bench.sparse_attention --decode-only --heads 64 --isa amx
    python -m bench.sparse_attention --decode-only --near-rows 8192 --tokens 32768 131072 --save

Two models of random weights with the attention of DeepSeek-V3.2, 16 heads of it or as many as are asked for, and hardly
anything else: one has its indexer (2,048 rows of all, index keys of 128), the other attends all rows. In each turn both
compute the same prompt in the native kernels, one after the other, or find one that is pretended, and then tokens in
turns; ratios are of neighbours, their spread is of the middle four fifths. With --near-rows the two are the sparse
model with so many rows of each layer near, the others in the host, and the same one with all rows in the cache.
"""

import argparse
import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from afserve.comm.m2n.bank import LocalTicket
from afserve.config import AUTO, EngineConfig, ModelSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import colocated
from afserve.engine.kv.cache import KvBlocks
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "sparse_attention.jsonl"
NEW, BLOCK, STEP, SOME = 33, 16, 512, 64
SHAPE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 4096,
    "q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "torch_dtype": "bfloat16",
}  # fmt: skip
INDEXER = {"index_n_heads": 16, "index_head_dim": 128, "index_topk": 2048}
SPARSE = {"model_type": "deepseek_v32", **INDEXER}
KINDS: dict[str, dict[str, Any]] = {"sparse": SPARSE, "full": {"model_type": "deepseek_v3"}, "near": SPARSE}


@dataclass(frozen=True, slots=True)
class Asked:
    """What both models have in common."""

    tokens: int
    threads: int
    layers: int
    heads: int
    isa: str
    near_rows: int = 0

    @property
    def pair(self) -> tuple[str, str]:
        """What is measured, and what beside."""
        return ("near", "sparse") if self.near_rows else ("sparse", "full")


def node_of(folder: Path, kind: str, asked: Asked) -> AttentionNode[LocalTicket]:
    """A model of this kind over a cache that holds one prompt and its answer."""
    longest = asked.tokens + NEW
    (folder / kind).mkdir()
    heads = {"num_attention_heads": asked.heads, "num_key_value_heads": asked.heads}
    sizes = {"max_position_embeddings": longest, "num_hidden_layers": asked.layers, **heads}
    (folder / kind / "config.json").write_text(json.dumps({**SHAPE, **KINDS[kind], **sizes}))
    source = ModelSource(str(folder / kind), kind, load_format="dummy")
    blocks = 2 + longest // BLOCK
    engine = EngineConfig(
        max_model_len=longest, kv_blocks=blocks, block_size=BLOCK, max_batch_tokens=STEP, micro_batches=1,
        threads=asked.threads, prefill_tokens=STEP, isa=asked.isa,
        kv_near_rows=asked.near_rows * (kind == "near"),
    )  # fmt: skip
    node = colocated(source, engine)
    node.note_line(0, moving=True)  # one token a step
    return node


def request_of(handle: int, prompt: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(handle, prompt, SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True))


def pretend(node: AttentionNode[LocalTicket], request: GenerationRequest) -> None:
    """The prompt is found as if it had been computed: random rows, which take as long to attend as any."""
    names, kv = node.usable_names(request), node.kv
    blocks = kv.pool.allocate(len(names))
    generator = torch.Generator().manual_seed(1)
    for first in range(0, len(blocks), SOME):
        some = blocks[first : first + SOME]
        drawn = torch.randn(SOME, kv.block_bytes // 2, generator=generator).bfloat16()
        kv.write(some, KvBlocks(kv.fingerprint, drawn[: len(some)].view(torch.uint8)))
    for block, name in zip(blocks, names, strict=True):
        kv.pool.publish(block, name)
    kv.pool.release(blocks)


def next_token(node: AttentionNode[LocalTicket]) -> float:
    """Seconds until it is there."""
    begin = time.perf_counter()
    while node.busy and not any(event.token_ids for event in node.step()):
        pass
    return time.perf_counter() - begin


def measure(asked: Asked, turns: int, decode_only: bool) -> dict[str, object]:
    """Each turn has a prompt of its own, so that none is found in the cache that was computed."""
    draw, (one, other) = random.Random(5), asked.pair
    ratios: dict[str, list[float]] = {"prompt": [], "token": []}
    found: dict[tuple[str, str], list[float]] = {(part, kind): [] for part in ratios for kind in asked.pair}
    with tempfile.TemporaryDirectory() as folder:
        nodes = {kind: node_of(Path(folder), kind, asked) for kind in asked.pair}
        for turn in range(turns):
            request = request_of(
                turn, tuple(draw.randrange(3, SHAPE["vocab_size"]) for _ in range(asked.tokens))
            )
            for kind, node in nodes.items():
                if decode_only:
                    pretend(node, request)
                node.submit(request)
                found["prompt", kind].append(next_token(node))
            ratios["prompt"].append(found["prompt", one][-1] / found["prompt", other][-1])
            before = nodes[one].kv.rows_read
            for _ in range(NEW - 1):
                for kind, node in nodes.items():
                    found["token", kind].append(next_token(node))
                ratios["token"].append(found["token", one][-1] / found["token", other][-1])
    isa = nodes[other].isa
    row: dict[str, object] = asdict(asked) | {"isa": isa, "turns": turns, "decode_only": decode_only}
    for name in ("token",) if decode_only else ("prompt", "token"):
        each = sorted(ratios[name])
        row |= {f"{name}_s": median(found[name, one]), f"{name}_{other}_s": median(found[name, other])}
        row |= {
            f"{name}_ratio": median(each),
            f"{name}_spread": [round(each[len(each) // 10], 5), round(each[-1 - len(each) // 10], 5)],
        }
    if asked.near_rows:
        row |= memory_of(nodes[one], before)
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}


def memory_of(node: AttentionNode[LocalTicket], before: tuple[int, int]) -> dict[str, object]:
    """Bytes of a token over all layers, in the host and near, what near rows take beside; of the rows that tokens of
    the last turn attended the share that was near."""
    kv = node.kv
    far, near, rows = (size for size in kv.bytes_apart)
    found, fetched = (now - then for now, then in zip(kv.rows_read, before, strict=True))
    return {
        "far_token_bytes": far // kv.pool.block_size, "near_token_bytes": near // kv.pool.block_size,
        "near_bytes": rows, "found_share": found / (found + fetched),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768], help="of the prompts")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="of both models")
    parser.add_argument("--heads", type=int, default=SHAPE["num_attention_heads"], help="of both models")
    parser.add_argument("--isa", default=AUTO, help="an instruction set; the best one without")
    parser.add_argument(
        "--decode-only", action="store_true", help="no prompt is computed, only tokens behind one"
    )
    parser.add_argument("--near-rows", type=int, default=0, help="of a layer, while the host has all")
    parser.add_argument("--save", action="store_true", help=f"append the rows to {OUT.relative_to(ROOT)}")
    args = parser.parse_args()
    for tokens in args.tokens:
        asked = Asked(tokens, args.threads, args.layers, args.heads, args.isa, args.near_rows)
        row = origin(args.isa) | measure(asked, args.turns, args.decode_only)
        print(json.dumps(row), flush=True)
        if args.save:
            with OUT.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
