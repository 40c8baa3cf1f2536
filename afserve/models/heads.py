"""Embedding and LM head: two tensors, or one where config.json ties them, and what to do where a checkpoint has both;
and the maps that bring rows of a look-up table to the embedding.
An embedding in ggml's types stays as it is stored; rows are de-quantised where they are looked up.

Fine-tunes are saved with both although config.json says that one is the other. Where they differ nobody knows which was
meant: transformers from version 5 on takes the file's head, earlier versions and vLLM the embedding. So the user says.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.errors import CheckpointError, ConfigError
from afserve.families.pattern.naming import Naming
from afserve.kernels.formats.ggml import GgmlRows
from afserve.kernels.ops import Ops
from afserve.models.dense import Dense, End
from afserve.models.weights import TensorSource
from afserve.spec import ModelSpec
from afserve.spec_parts import TableSpec


@dataclass(frozen=True, slots=True)
class EndTensors:
    """Both V x H."""

    embed_VH: End
    head_VH: End


def load_ends(
    spec: ModelSpec,
    source: TensorSource,
    naming: Naming,
    dense: Dense,
    dtype: torch.dtype,
    asked: str = "auto",
) -> EndTensors:
    """`asked` is the setting lm_head. Raises CheckpointError where tied tensors differ and nothing was asked for,
    ConfigError where there is nothing to choose."""
    shape, names = (spec.vocab_size, spec.hidden), (naming.embedding, naming.head)
    embedding, head = names
    both = all(map(source.stores, names))
    if asked != "auto" and not (spec.tied and both):
        raise ConfigError(
            f"--lm-head {asked}: only where config.json has tie_word_embeddings and the checkpoint both {embedding} "
            f"and {head} is there something to choose; leave it out",
            param="lm_head",
        )
    if spec.tied and not both:
        name = head if source.stores(head) else embedding
        one = _held(dense.read_end(source, name, shape))
        return EndTensors(one, one)
    embed_VH = _held(dense.read_end(source, embedding, shape))
    if asked == "embedding":
        return EndTensors(embed_VH, embed_VH)
    if not spec.tied or asked == "checkpoint":
        return EndTensors(embed_VH, dense.read_end(source, head, shape))
    _check_equal(source.tensor(embedding, shape, dtype), source.tensor(head, shape, dtype), embedding, head)
    return EndTensors(embed_VH, embed_VH)


class TableMaps:
    """Of a look-up table what an attention node holds: x = (embedding + sum over heads of map_n row_n) / (1 + N).

    Shapes: T tokens, N heads, D numbers of a row, X of one that came."""

    def __init__(
        self, spec: ModelSpec, table: TableSpec, source: TensorSource, naming: Naming, dense: Dense, ops: Ops
    ) -> None:
        shape = spec.hidden, table.width
        maps = [source.tensor(naming.table_maps(head), shape, dense.dtype) for head in range(table.heads)]
        self._map, self._ops = dense.linear(torch.cat(maps, 1)), ops
        self._numbers, self._parts = table.heads * table.width, 1 + table.heads

    def add(self, x_TH: Tensor, rows_TX: Tensor | None) -> Tensor:
        """Into x_TH. The first N D numbers of `rows_TX` are a token's rows, head after head; any float dtype. Without
        any they are zeros."""
        if rows_TX is not None:
            rows_TN = rows_TX[:, : self._numbers].to(x_TH.dtype).contiguous()
            x_TH += self._ops.linear(rows_TN, self._map)
        return x_TH.div_(self._parts)


def embedded(table_VH: End, token_T: Tensor, dtype: torch.dtype, ops: Ops) -> Tensor:
    """Fresh rows (T, H)."""
    if isinstance(table_VH, Tensor):
        return torch.index_select(table_VH, 0, token_T)
    assert ops.ggml is not None, "numbers were read where nothing multiplies ggml's types"
    return ops.ggml.rows_of(table_VH, token_T, dtype)


def _held(weight: End) -> End:
    """Bytes that do not lie in a mapped file."""
    if isinstance(weight, Tensor):
        return weight
    return GgmlRows(weight.kind, weight.bytes_RB.clone(), weight.inputs)


def _check_equal(embed_VH: Tensor, head_VH: Tensor, embedding: str, head: str) -> None:
    if torch.equal(embed_VH, head_VH):
        return
    rows = int((embed_VH != head_VH).any(1).sum())
    raise CheckpointError(
        f"config.json: tie_word_embeddings is true, but the checkpoint's {head} is another tensor than {embedding}: "
        f"{rows:,} of {len(embed_VH):,} rows differ. --lm-head checkpoint takes {head}, as transformers 5 does; "
        f"--lm-head embedding takes {embedding}, as transformers 4 and vLLM do"
    )
