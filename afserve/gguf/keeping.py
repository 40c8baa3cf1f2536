"""Which weights of a GGUF file stay as they are stored where the native library computes, and the bits that they take.
Without torch.

Of a linear map and of the embedding any of the library's types stays; gate and up of a layer's experts are one product,
and have one type. The two projections up from a latent are de-quantised.
"""

import math
from collections.abc import Iterable, Mapping

from afserve.gguf.header import TensorRow
from afserve.gguf.kinds import PACKED

KEPT = ("Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_EMBEDDING = "token_embd.weight"
_PLAIN = ("attn_k_b.weight", "attn_v_b.weight", "attn_kv_b.weight", "ssm_out.weight")
_EXPERTS = "_exps.weight"
_PARTS = ("gate", "up", "down")
_ANYWHERE = ("Q4_0", "MXFP4")  # of experts: codes that other backends keep too
_MXFP4_BITS = 4.5  # scales are bfloat16 numbers in memory


def dequantised_rows(rows: Mapping[str, TensorRow]) -> list[TensorRow]:
    """Those of blocks that no kernel multiplies as they are."""
    return [row for row in rows.values() if row.kind.name in PACKED and not _stays(row, rows)]


def kept_bits(rows: Mapping[str, TensorRow], dtype: object) -> dict[str, object]:
    """A file's `quantization_config`: bits of a weight in memory, of experts and of other maps; others are `dtype`."""
    experts = [row for row in rows.values() if row.name.endswith(_EXPERTS)]
    maps = [row for row in rows.values() if len(row.shape) > 1 and not row.name.endswith(_EXPERTS)]
    kinds = {row.kind.name for row in experts}
    layout = next((kind.lower() for kind in _ANYWHERE if kinds == {kind}), "mixed")
    whole = 32.0 if dtype == "float32" else 16.0
    return {
        "quant_method": "gguf",
        "experts": layout,
        "expert_bits": _mean(experts, rows, whole),
        "map_bits": _mean([row for row in maps if row.name != _EMBEDDING], rows, whole),
        "embedding_bits": _mean([row for row in maps if row.name == _EMBEDDING], rows, whole),
    }


def _stays(row: TensorRow, rows: Mapping[str, TensorRow]) -> bool:
    kind = row.kind.name
    if not row.name.endswith(_EXPERTS):
        return kind in KEPT and not row.name.endswith(_PLAIN)
    if kind == "MXFP4":
        return all(other.kind.name == kind for name, other in rows.items() if name.endswith(_EXPERTS))
    stem = row.name[: row.name.index("ffn_")]
    parts = [rows.get(f"{stem}ffn_{part}{_EXPERTS}") for part in _PARTS]
    found = [part.kind.name for part in parts if part is not None]
    return len(found) == len(_PARTS) and set(found) <= set(KEPT) and found[0] == found[1]


def _mean(some: Iterable[TensorRow], rows: Mapping[str, TensorRow], whole: float) -> float:
    bits = numbers = 0.0
    for row in some:
        count = math.prod(row.shape)
        numbers += count
        if not _stays(row, rows):
            bits += count * whole
        elif row.kind.name == "MXFP4":
            bits += count * _MXFP4_BITS
        else:
            bits += 8 * (row.end - row.begin)
    return bits / numbers if numbers else whole
