"""From logits to tokens: the likeliest ones, and draws by penalties, temperature, top-k, top-p, min-p and grammars.

A row's outcome depends on its own logits, parameters, history and position only, never on its neighbours, so
any batching gives the same tokens. All rows are drawn at once where they lie (`draws.py`), and the host reads their
tokens once. Shapes: R rows, D of them that are drawn from, V vocabulary, B bytes of bits.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afserve.engine.draws import (
    COLDEST,
    NARROW,
    NEVER,
    NONE_LEFT,
    draw_ranked,
    draw_tokens,
    drawn_number,
    forbidden_of,
)
from afserve.engine.edits import NO_EDITS, Edits, edits_of
from afserve.engine.scheduling.guides import Guide
from afserve.engine.scheduling.request import NOT_FINITE, SamplingParams
from afserve.engine.scheduling.sequence import Sequence, takes_likeliest
from afserve.engine.step.host_reader import Reads, read_at_once
from afserve.engine.step.step_buffers import StepBuffers
from afserve.errors import RequestError
from afserve.kernels.ops import Ops

T = TypeVar("T")
NUCLEUS = 1024  # so many tokens of a row are put in order at first: a sort of 129,280 takes ten times as long
# Logits at once: on a CPU what fits its cache, on a device what 256 MB hold.
_AT_ONCE = 1 << 17
_AT_ONCE_ON_DEVICE = 1 << 25

_NONE_LEFT = "min_tokens: every token that may come next is a stop token, so none can be held back"

log = logging.getLogger("afserve.engine")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sequence got no token; it ends with this message, its neighbours do not notice."""

    message: str


_SPOILED = Failure(NOT_FINITE.format(where="the final norm or the LM head"))


@dataclass(frozen=True, slots=True)
class _Draw:
    """Of one `row` of the logits, for the outcome `at`: with the mask of its grammar, or without; put in order as
    a whole (`wide`), or the best few of it."""

    at: int
    row: int
    sequence: Sequence
    edits: Edits = NO_EDITS
    allowed_B: NDArray[np.uint8] | None = None
    wide: bool = False


class Sampler:
    """Of one micro-batch; what it tells a device lies in `buffers`."""

    def __init__(self, ops: Ops, buffers: StepBuffers) -> None:
        self._ops, self._buffers = ops, buffers

    def sample(
        self, logits_RV: Tensor, sequences: Many[Sequence], rows: Many[int] | None = None
    ) -> list[int | Failure]:
        """What `draw_rows` gives; it waits for a device."""
        return read_at_once(self.draw_rows(logits_RV, sequences, rows))

    def draw_rows(
        self, logits_RV: Tensor, sequences: Many[Sequence], rows: Many[int] | None = None
    ) -> Reads[list[int | Failure]]:
        """One token or failure for each sequence, from its row (without `rows`: the one at its place); logits are not
        changed. A row with a logit that is not finite has no token: nothing drawn from it would mean anything. Who is
        plainly greedy takes the likeliest token. A grammar is asked about the drawn token; where it says no, one is
        drawn from what it allows: both together are a draw from what it allows, and most draws need no mask.
        """
        rows = range(len(sequences)) if rows is None else rows
        draws, followed, failed = list[_Draw](), list[_Draw](), dict[int, Failure]()
        for at, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
            if not plain(sequence):
                first = _guarded(sequence, partial(_first, at, row, sequence, logits_RV.shape[1]))
                if isinstance(first, Failure):
                    failed[at] = first
                else:
                    draws.append(first)
            elif sequence.guide is not None:
                followed.append(_Draw(at, row, sequence))
        best, tokens = yield from self._tokens(logits_RV, draws)
        found = [best[row] if best[row] >= 0 else _SPOILED for row in rows]
        told = [*zip(draws, tokens, strict=True), *((draw, best[draw.row]) for draw in followed)]
        for at, why in failed.items():
            found[at] = why if found[at] is not _SPOILED else _SPOILED
        yield from self._settle(
            logits_RV, [(draw, token) for draw, token in told if found[draw.at] is not _SPOILED], found
        )
        return found

    def _tokens(self, logits_RV: Tensor, draws: list[_Draw]) -> Reads[tuple[list[int], list[int]]]:
        """The likeliest token of each row, below 0 where there is none, and those of the draws."""
        best_R = self._ops.argmax(logits_RV)
        if not draws:
            return (yield best_R), []
        told = yield torch.cat([best_R, self._draw(logits_RV, draws)])
        return told[: len(best_R)], told[len(best_R) :]

    def _settle(
        self, logits_RV: Tensor, told: Many[tuple[_Draw, int]], found: list[int | Failure]
    ) -> Reads[None]:
        """What the draws gave into `found`. Some are drawn once more: two times at most."""
        while told:
            again = []
            for draw, token in told:
                outcome = _outcome(draw, token)
                if isinstance(outcome, _Draw):
                    again.append(outcome)
                else:
                    found[draw.at] = outcome
            told = list(zip(again, (yield self._draw(logits_RV, again)), strict=True)) if again else []

    def _draw(self, logits_RV: Tensor, draws: list[_Draw]) -> Tensor:
        """A token for each, int64 (D,), or what `draw_tokens` says instead. Puts `draws` in order: one kind behind the
        other."""
        draws.sort(key=_kind)
        most = _AT_ONCE if logits_RV.is_cpu else _AT_ONCE_ON_DEVICE
        step, found = max(1, most // logits_RV.shape[1]), list[Tensor]()
        for _, same in groupby(draws, _kind):
            kind = list(same)
            for first in range(0, len(kind), step):
                found.append(self._draw_piece(logits_RV, kind[first : first + step], len(found)))
        return torch.cat(found) if len(found) > 1 else found[0]

    def _draw_piece(self, logits_RV: Tensor, draws: list[_Draw], piece: int) -> Tensor:
        """Of one kind. Each piece of a step has buffers of its own, as copies to a device may be under way."""
        params = [draw.sequence.request.params for draw in draws]
        columns = [number for column in zip(*map(_settings, draws), strict=True) for number in column]
        (settings_N,) = self._buffers.write(f"draws {piece}", len(columns), torch.float64, [columns])
        settings_5D1 = settings_N.view(5, -1, 1)
        logits_DV = self._rows(logits_RV, [draw.row for draw in draws], piece)
        edited = any(draw.edits is not NO_EDITS or draw.allowed_B is not None for draw in draws)
        ranked = not draws[0].wide and params[0].top_k > 0 and _cut(params[0])
        if edited or not ranked:
            logits_DV = logits_DV.to(torch.float64, copy=True)
        if edited:
            self._edit(logits_DV, [draw.edits for draw in draws], piece)
            self._mask(logits_DV, [draw.allowed_B for draw in draws if draw.allowed_B is not None], piece)
        floors = any(p.min_p > 0.0 for p in params)
        if ranked:
            nuclei, most = any(p.top_p < 1.0 for p in params), max(p.top_k for p in params)
            return draw_ranked(logits_DV, settings_5D1, most, nuclei, floors)
        heaviest = (logits_DV.shape[1] if draws[0].wide else NUCLEUS) if _cut(params[0]) else 0
        return draw_tokens(logits_DV, settings_5D1, heaviest, floors)

    def _rows(self, logits_RV: Tensor, rows: list[int], piece: int) -> Tensor:
        first = rows[0]
        if rows == list(range(first, first + len(rows))):
            return logits_RV[first : first + len(rows)]
        (row_D,) = self._buffers.write(f"drawn {piece}", len(rows), torch.int64, [rows])
        return logits_RV.index_select(0, row_D)

    def _edit(self, logits_DV: Tensor, edits: Many[Edits], piece: int) -> None:
        """Places are counted through all rows; none stands twice."""
        vocabulary, flat_N = logits_DV.shape[1], logits_DV.view(-1)
        scaled, factors, added, values = list[int](), list[float](), list[int](), list[float]()
        for at, edit in enumerate(edits):
            scaled += [at * vocabulary + token for token in edit.scaled]
            factors += [edit.factor] * len(edit.scaled)
            added += [at * vocabulary + token for token in edit.added]
            values += edit.added.values()
        if scaled:
            (at_E,) = self._buffers.write(f"scaled {piece}", len(scaled), torch.int64, [scaled])
            (factor_E,) = self._buffers.write(f"factors {piece}", len(scaled), torch.float64, [factors])
            value_E = flat_N.index_select(0, at_E)
            flat_N.index_copy_(0, at_E, torch.where(value_E > 0, value_E / factor_E, value_E * factor_E))
        if added:
            (at_E,) = self._buffers.write(f"added {piece}", len(added), torch.int64, [added])
            (value_E,) = self._buffers.write(f"values {piece}", len(added), torch.float64, [values])
            flat_N.index_add_(0, at_E, value_E)

    def _mask(self, logits_DV: Tensor, allowed: Many[NDArray[np.uint8]], piece: int) -> None:
        if allowed:
            bits = np.concatenate(allowed)
            (bits_N,) = self._buffers.write(f"bits {piece}", len(bits), torch.uint8, [bits])
            forbidden_DV = forbidden_of(bits_N.view(len(allowed), -1), logits_DV.shape[1])
            logits_DV.masked_fill_(forbidden_DV, NEVER)


def rows_of(x_RV: Tensor, rows: list[int]) -> Tensor:
    """A copy of these rows, where they lie."""
    return x_RV.index_select(0, torch.tensor(rows, dtype=torch.int64, device=x_RV.device))


def plain(sequence: Sequence) -> bool:
    """Whether it takes the likeliest token, and all later ones, as far as a grammar lets it."""
    params = sequence.request.params
    return takes_likeliest(params) and sequence.output_length >= params.min_tokens


def _first(at: int, row: int, sequence: Sequence, vocabulary: int) -> _Draw:
    """A grammar's mask comes first where the best few are cut out: they are the best of what it allows."""
    draw = _Draw(at, row, sequence, edits_of(sequence, vocabulary))
    shaped = _cut(sequence.request.params) or sequence.request.params.min_p > 0.0
    return _masked(draw) if sequence.guide is not None and shaped else draw


def _masked(draw: _Draw) -> _Draw:
    sequence = draw.sequence
    assert sequence.guide is not None
    return replace(draw, allowed_B=sequence.guide.allowed_B(sequence.tokens, sequence.prompt_length))


def _outcome(draw: _Draw, token: int) -> int | Failure | _Draw:
    """What a draw's token comes to, or how it is drawn once more."""
    sequence = draw.sequence
    if token == NONE_LEFT:
        return Failure(_NONE_LEFT)
    if token == NARROW:
        return replace(draw, wide=True)
    if (
        draw.allowed_B is None
        and sequence.guide is not None
        and not _allowed(sequence.guide, sequence, token)
    ):
        return _guarded(sequence, partial(_masked, draw))
    return token


def _allowed(guide: Guide, sequence: Sequence, token: int) -> bool:
    """Whatever is wrong with a grammar is told by its mask, which is asked for next."""
    try:
        return guide.allows(sequence.tokens, sequence.prompt_length, token)
    except Exception:  # noqa: BLE001 - its mask raises it again
        return False


def _guarded(sequence: Sequence, work: Callable[[], T]) -> T | Failure:
    """Whatever goes wrong with one row, the rows beside it get their tokens."""
    try:
        return work()
    except RequestError as error:
        return Failure(error.message)
    except Exception as error:  # the request ends with it, and the log has the rest
        log.exception("request %d: sampling failed", sequence.request.handle)
        return Failure(
            f"sampling failed for this request ({type(error).__name__}); the node's log has the reason"
        )


def _settings(draw: _Draw) -> tuple[float, float, float, float, float]:
    """A row of `draw_tokens`. The likeliest token, the first of equals, is what the least number falls on."""
    sequence, p = draw.sequence, draw.sequence.request.params
    if _coldest(p):
        return COLDEST, 0, 1.0, 0.0, 0.0
    assert p.seed is not None, "the scheduler takes no request that draws without a seed"
    number = drawn_number(p.seed, sequence.output_length, draw.allowed_B is not None)
    return p.temperature, max(0, p.top_k), p.top_p, p.min_p, number


def _coldest(params: SamplingParams) -> bool:
    return params.greedy or params.top_k == 1


def _cut(params: SamplingParams) -> bool:
    """Whether its tokens have to be put in order."""
    return not _coldest(params) and (params.top_k > 0 or params.top_p < 1.0)


def _kind(draw: _Draw) -> tuple[bool, bool, bool, bool]:
    """Draws of one kind are one call."""
    params = draw.sequence.request.params
    cut = _cut(params)
    return cut, cut and params.top_k > 0 and not draw.wide, draw.wide, draw.allowed_B is not None
