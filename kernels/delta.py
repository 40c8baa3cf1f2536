"""What a layer with a state has between its projections: a short convolution, then a rule that moves its states, which
lie in a paged cache; or the convolution alone.

A layer keeps one state a block: that after the last token that the block has. So a full block's state is a snapshot at
its end, whoever holds the block may go on behind it, and a block's bytes carry its state wherever they go. A chunk of a
sequence begins with the state of the block before it and leaves one in every block that it reaches.

Sources: Gated Delta Networks (arXiv 2412.06464), equation 10, and section 3.3 for the form of whole chunks; Kimi Linear
(arXiv 2510.26692), where each key number forgets by itself; Mamba-2 (arXiv 2405.21060), which adds values alone.
Order of heads and constants are those of transformers' `modeling_qwen3_next`, `modeling_kimi_linear` and
`modeling_mamba2`. All of it is computed in float32.

Shapes: T tokens, S sequences, L tokens of a segment, C channels of the convolution, W its taps, G key heads, V value
heads, K key size, D value size, N blocks, F numbers of a state, E decays of a head (1 or K).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from afserve.kernels.paged import PagedBatch
from afserve.kernels.states.rules import LONGEST, OWN, RULES, Rule, StateMoves

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of one layer. `key_heads` divide `value_heads`; neighbours among those share a key head.

    `rule`: a state forgets by `head`, or by `channel` of a key, and what it says for a key is replaced; or it forgets
    by head and a value is added (`sum`), with queries and keys of any length."""

    key_heads: int
    value_heads: int
    key: int
    value: int
    taps: int
    rule: Rule = "head"

    @property
    def decays(self) -> int:
        """Of one token."""
        return self.value_heads * (self.key if self.rule == "channel" else 1)

    @property
    def rule_number(self) -> int:
        """As native/delta.h has it."""
        return RULES.index(self.rule)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        keys = self.key_heads * self.key
        return keys, keys, self.value_heads * self.value

    @property
    def channels(self) -> int:
        return sum(self.widths)

    @property
    def matrix(self) -> int:
        """Numbers of all heads' (K, D) matrices."""
        return self.value_heads * self.key * self.value

    @property
    def numbers(self) -> int:
        """Float32 numbers of a state: the matrices, then the last W - 1 inputs of the convolution, eldest first."""
        return self.matrix + (self.taps - 1) * self.channels


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """`conv_WC` holds the taps, the newest token's last; contiguous float32, as what follows: `bias_C` is added to the
    convolution, and `skip_V` times a head's value to what it reads."""

    shape: DeltaShape
    conv_WC: Tensor
    bias_C: Tensor | None = None
    skip_V: Tensor | None = None

    def mixed(self, sum_TC: Tensor) -> Tensor:
        """Behind the taps."""
        return F.silu(sum_TC if self.bias_C is None else sum_TC + self.bias_C)

    def skipped(self, out_TVD: Tensor, v_TVD: Tensor) -> Tensor:
        return out_TVD if self.skip_V is None else out_TVD + self.skip_V[:, None] * v_TVD


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """What a layer's projections say of T tokens: `mixed_TC` are queries, keys and values before the convolution,
    `decay_TE` the logarithms, at most 0, of what a state keeps, head by head, `beta_TV` in 0 to 1 how much of it is
    replaced, or what an added value is multiplied by."""

    mixed_TC: Tensor
    decay_TE: Tensor
    beta_TV: Tensor

    def of(self, row_R: Tensor) -> "DeltaRows":
        """A copy of some of them."""
        return DeltaRows(self.mixed_TC[row_R], self.decay_TE[row_R], self.beta_TV[row_R])


def delta_rows(
    rows: DeltaRows,
    layer: DeltaLayer,
    state_NF: Tensor,
    block_size: int,
    batch: PagedBatch,
    moves: StateMoves = OWN,
    singly: "Singly | None" = None,
    together: "Together | None" = None,
) -> Tensor:
    """(T, V, D) float32: what every token reads. States are left in `state_NF` for each block that is reached. `singly`
    and `together` move those of sequences with one token each, and with several, in the place of `moves`.

    Reads no device's values back, if the batch has its host integers.
    """
    sizes = batch.tokens, layer.shape.value_heads, layer.shape.value
    out_TVD = torch.empty(sizes, dtype=torch.float32, device=rows.mixed_TC.device)
    starts, contexts = _host(batch)

    def move_alone(part: slice, table_SB: Tensor) -> Tensor:
        position_S = batch.position_T[part]
        if singly is None:
            return _decode(_part(rows, part), layer, state_NF, table_SB.long(), position_S, block_size, moves)
        alone = DeltaRows(rows.mixed_TC[part], rows.decay_TE[part], rows.beta_TV[part])
        return singly(alone, layer, state_NF, table_SB, position_S, block_size)

    for first, end in _runs(starts, together is not None and not batch.singly):
        part, table_SB = slice(starts[first], starts[end]), batch.block_table_SB[first:end]
        if part.stop - part.start == end - first:
            found = move_alone(part, table_SB)
            if end - first == batch.tokens:
                return found
            out_TVD[part] = found
        elif batch.singly:
            for row in range(part.start, part.stop):
                out_TVD[row] = move_alone(slice(row, row + 1), table_SB)[0]
        elif together is not None:
            ends = zip(pairwise(starts[first : end + 1]), contexts[first:end], strict=True)
            spans = [(context - (stop - start), context) for (start, stop), context in ends]
            together(rows, layer, state_NF, batch, first, spans, block_size, out_TVD)
        else:
            position = contexts[first] - (part.stop - part.start)
            out_TVD[part] = _prompt(
                _part(rows, part), layer, state_NF, table_SB[0].long(), position, block_size, moves
            )
    return out_TVD


Singly = Callable[[DeltaRows, DeltaLayer, Tensor, Tensor, Tensor, int], Tensor]
"""(S, V, D) float32 of rows, layer, `state_NF`, the block table of S sequences, their positions, tokens of a block."""
Spans = Sequence[tuple[int, int]]
Together = Callable[[DeltaRows, DeltaLayer, Tensor, PagedBatch, int, Spans, int, Tensor], None]
"""Of a whole batch, the number of a sequence and, from that one on, the position of each one's first token, and that
behind its last; tokens of a block, and what is filled for them: (T, V, D) float32 of all rows."""


def convolve_rows(
    x_TC: Tensor, conv_WC: Tensor, state_NF: Tensor, block_size: int, batch: PagedBatch
) -> Tensor:
    """A short convolution alone, (T, C) float32: every token's channels over the last W tokens, whose states are the
    last W - 1 inputs, eldest first. A token's bits do not depend on how many are computed at once."""
    out_TC = torch.empty(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    starts, contexts = _host(batch)
    for first, end in _runs(starts):
        part, table_SB = slice(starts[first], starts[end]), batch.block_table_SB[first:end].long()
        rows, before = x_TC[part].float(), len(conv_WC) - 1
        if len(rows) == end - first:
            position_S = batch.position_T[part]
            seen_WSC = _seen_before(state_NF, table_SB, position_S, block_size).unflatten(1, (before, -1))
            seen_WSC = torch.cat((seen_WSC.transpose(0, 1), rows[None]))
            out_TC[part] = _tapped(list(seen_WSC), conv_WC)
            now = table_SB.gather(1, (position_S // block_size)[:, None])[:, 0]
            state_NF.index_copy_(0, now, seen_WSC[1:].transpose(0, 1).flatten(1))
            continue
        at, count = contexts[first] - len(rows), len(rows)
        state_1F = _seen_before(state_NF, table_SB, batch.position_T[part][:1], block_size)
        seen_TC = torch.cat((state_1F.view(before, -1), rows))
        out_TC[part] = _tapped([seen_TC[tap : tap + count] for tap in range(before + 1)], conv_WC)
        for _, stop in _segments(at, count, block_size, LONGEST):
            if stop == count or not (at + stop) % block_size:
                block_1 = _block_of(table_SB[0], at + stop - 1, block_size)
                state_NF.index_copy_(0, block_1, seen_TC[stop : stop + before].flatten()[None])
    return out_TC


def _tapped(seen_WTC: list[Tensor], conv_WC: Tensor) -> Tensor:
    """One tap after the other, so that sums have one order."""
    out_TC = seen_WTC[0] * conv_WC[0]
    for seen_TC, tap_C in zip(seen_WTC[1:], conv_WC[1:], strict=True):
        out_TC = out_TC + seen_TC * tap_C
    return out_TC


def _seen_before(state_NF: Tensor, table_SB: Tensor, position_S: Tensor, block_size: int) -> Tensor:
    """(S, F): each sequence's state behind the token before `position_S`; zeros where there is none."""
    before = (position_S - 1).clamp_min(0) // block_size
    state_SF = state_NF.index_select(0, table_SB.gather(1, before[:, None])[:, 0])
    return state_SF.masked_fill_((position_S == 0)[:, None], 0.0)


def _host(batch: PagedBatch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if batch.starts:
        return batch.starts, batch.contexts
    return tuple(batch.query_start_S1.tolist()), tuple(batch.context_S.tolist())


def _runs(starts: tuple[int, ...], together: bool = False) -> Iterator[tuple[int, int]]:
    """Sequences that are computed at once, first and end: neighbours with one token each, or one with several;
    `together`: neighbours with several."""
    single = [end - start == 1 for start, end in pairwise(starts)]
    first = 0
    while first < len(single):
        end = first + 1
        while end < len(single) and single[end] == single[first] and (together or single[first]):
            end += 1
        yield first, end
        first = end


def _part(rows: DeltaRows, which: slice) -> DeltaRows:
    return DeltaRows(rows.mixed_TC[which].float(), rows.decay_TE[which], rows.beta_TV[which])


def _decode(
    rows: DeltaRows,
    layer: DeltaLayer,
    state_NF: Tensor,
    table_SB: Tensor,
    position_S: Tensor,
    block_size: int,
    moves: StateMoves,
) -> Tensor:
    """One token of each of S sequences, at once: (S, V, D)."""
    shape, count = layer.shape, len(position_S)
    state_SF = _seen_before(state_NF, table_SB, position_S, block_size)
    matrix, window = state_SF.split((shape.matrix, shape.numbers - shape.matrix), 1)
    seen_SWC = torch.cat((window.view(count, shape.taps - 1, shape.channels), rows.mixed_TC[:, None]), 1)
    q, k, v = _heads(layer.mixed((seen_SWC * layer.conv_WC).sum(1)), shape)
    decay_SVE = rows.decay_TE.unflatten(1, (shape.value_heads, -1))
    matrix_SVKD = matrix.unflatten(1, _matrix(shape))
    out, matrix = moves.step(q, k, v, decay_SVE, rows.beta_TV, matrix_SVKD, shape.rule)
    now = table_SB.gather(1, (position_S // block_size)[:, None])[:, 0]
    state_NF.index_copy_(0, now, torch.cat((matrix.flatten(1), seen_SWC[:, 1:].flatten(1)), 1))
    return layer.skipped(out, v)


def _prompt(
    rows: DeltaRows,
    layer: DeltaLayer,
    state_NF: Tensor,
    table_B: Tensor,
    first: int,
    block_size: int,
    moves: StateMoves,
) -> Tensor:
    """Tokens of one sequence from position `first` on: (T, V, D)."""
    shape, count = layer.shape, len(rows.mixed_TC)
    if first:
        state_F = state_NF.index_select(0, _block_of(table_B, first - 1, block_size))[0]
    else:
        state_F = torch.zeros(shape.numbers, device=state_NF.device)
    matrix_VKD = state_F[: shape.matrix].view(_matrix(shape))
    seen_TC = torch.cat((state_F[shape.matrix :].view(-1, shape.channels), rows.mixed_TC))
    mixed_TC = (seen_TC.unfold(0, shape.taps, 1) * layer.conv_WC.T).sum(-1)
    q, k, v = (x.transpose(0, 1) for x in _heads(layer.mixed(mixed_TC), shape))
    decay_VTE = rows.decay_TE.unflatten(1, (shape.value_heads, -1)).transpose(0, 1)
    beta_VT = rows.beta_TV.T
    outs = []
    for start, end in _segments(first, count, block_size, moves.longest):
        part = slice(start, end)
        decay_VLE, beta_VL = decay_VTE[:, part], beta_VT[:, part]
        out, matrix_VKD = moves.segment(
            q[:, part], k[:, part], v[:, part], decay_VLE, beta_VL, matrix_VKD, shape.rule
        )
        outs.append(out)
        if end == count or not (first + end) % block_size:
            kept = torch.cat((matrix_VKD.flatten(), seen_TC[end : end + shape.taps - 1].flatten()))
            state_NF.index_copy_(0, _block_of(table_B, first + end - 1, block_size), kept[None])
    return layer.skipped(torch.cat(outs, 1).transpose(0, 1), v.transpose(0, 1))


def _block_of(table_B: Tensor, position: int, block_size: int) -> Tensor:
    """As a tensor of one: what a device knows is not waited for."""
    block = position // block_size
    return table_B[block : block + 1]


def _segments(first: int, count: int, block_size: int, longest: int) -> Iterator[tuple[int, int]]:
    """Places in a chunk: every segment lies in one block, and in one part of `longest` tokens of it."""
    start = 0
    while start < count:
        inside = (first + start) % block_size
        end = min(start + min(longest - inside % longest, block_size - inside), count)
        yield start, end
        start = end


def _matrix(shape: DeltaShape) -> tuple[int, int, int]:
    return shape.value_heads, shape.key, shape.value


def _heads(mixed_TC: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor, Tensor]:
    """(T, V, K), (T, V, K) and (T, V, D): queries and keys of length 1, queries scaled; or as they are."""
    q, k, v = mixed_TC.split(shape.widths, 1)
    repeats, unit = shape.value_heads // shape.key_heads, shape.rule != "sum"
    wide = [x.unflatten(1, (shape.key_heads, shape.key)) for x in (q, k)]
    both = [(_unit(x) if unit else x).repeat_interleave(repeats, 1) for x in wide]
    q = both[0] * shape.key**-0.5 if unit else both[0]
    return q, both[1], v.unflatten(1, (shape.value_heads, shape.value))


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
