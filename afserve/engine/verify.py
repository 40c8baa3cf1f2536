"""The tokens that a step gives its sequences: of each one, and behind it those of a draft that the target's own step
confirms. Shapes: R rows of logits, V vocabulary.

Each row is drawn as a step without a draft would draw it, with the tokens before it and no others: seeds, penalties,
min_tokens and grammars see what they would have seen. A row behind a wrong guess was drawn in vain.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from afserve.engine.logprobs import logprobs_of
from afserve.engine.sampler import Failure, Sampler, plain
from afserve.engine.scheduling.request import TokenLogprob
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.step_plan import PROMPT, StepPlan
from afserve.engine.step.host_reader import Reads
from afserve.engine.step.step_buffers import StepBuffers

Run = tuple[int, ...]  # tokens of one sequence, one after the other


class Rows(NamedTuple):
    """Of one sequence: its newest token's is the `first`, those of the `supposed` tokens of its draft follow."""

    sequence: Sequence
    first: int
    supposed: int = 0


def draw_tokens(
    logits_RV: Tensor, asked: Mapping[int, Rows], sampler: Sampler
) -> Reads[dict[int, Run | Failure]]:
    """A token for each, where no draft is to be confirmed; or why there is none."""
    if not asked:
        return {}
    sequences, places = zip(*((rows.sequence, rows.first) for rows in asked.values()), strict=True)
    told = yield from sampler.draw_rows(logits_RV, sequences, places)
    return {i: one if isinstance(one, Failure) else (one,) for i, one in zip(asked, told, strict=True)}


def draw_runs(
    logits_RV: Tensor, asked: Mapping[int, Rows], sampler: Sampler
) -> Reads[dict[int, Run | Failure]]:
    """At least one token for each, all rows drawn in one call; or why there is none."""
    sequences = {index: _drawn(*rows) for index, rows in asked.items()}
    flat = [one for several in sequences.values() for one in several]
    places = [asked[index].first + at for index, several in sequences.items() for at in range(len(several))]
    outcomes = iter((yield from sampler.draw_rows(logits_RV, flat, places)) if flat else ())
    found = dict[int, Run | Failure]()
    for index, several in sequences.items():
        own = list(islice(outcomes, len(several)))
        found[index] = yield from _confirmed(asked[index], own, logits_RV, sampler)
    return found


def _drawn(sequence: Sequence, first: int, supposed: int) -> list[Sequence]:
    """As it is at the first of its rows and, behind so many tokens of its draft, at the others. A grammar goes no step
    back, so who follows one is drawn row by row, as long as its draft is right."""
    if sequence.guide is not None:
        return [sequence]
    if plain(sequence):
        return [sequence] * (1 + supposed)
    return [sequence, *(sequence.supposing(sequence.draft[:at]) for at in range(1, 1 + supposed))]


def _confirmed(
    rows: Rows, outcomes: Many[int | Failure], logits_RV: Tensor, sampler: Sampler
) -> Reads[Run | Failure]:
    """One token more than of the draft is right, or as many where the next row gives no token: the step that computes
    it again says why. Rows behind the `outcomes` are drawn here."""
    token, sequence = outcomes[0], rows.sequence
    if isinstance(token, Failure):
        return token
    run = [token]
    for at, guess in enumerate(sequence.draft[: rows.supposed], 1):
        if run[-1] != guess:
            break
        if at < len(outcomes):
            token = outcomes[at]
        else:
            row = rows.first + at
            (token,) = yield from sampler.draw_rows(logits_RV[row : row + 1], [sequence.supposing(run)])
        if isinstance(token, Failure):
            break
        run.append(token)
    return tuple(run)


class ScoredRun(NamedTuple):
    """Tokens of a `chunk` whose log-probabilities are wanted, the `first` of the rows that gave them, and how many
    alternatives. Below zero: ~chunk, whose prompt's they are."""

    chunk: int
    first: int
    tokens: Many[int]
    most: int


def scored_tokens(
    plan: StepPlan, ends: Many[int], asked: Mapping[int, Rows], outcomes: Mapping[int, Run | Failure]
) -> Iterator[ScoredRun]:
    """Of runs and of prompts: row i of a chunk foretells token start + i + 1, the last one's is not the prompt's."""
    for index, chunk in enumerate(plan.chunks):
        sequence, run = chunk.sequence, outcomes.get(index)
        params = sequence.request.params
        if isinstance(run, tuple) and params.logprobs is not None:
            yield ScoredRun(index, asked[index].first, run, params.logprobs)
        if chunk.kind is PROMPT and sequence.collects_prompt:
            end = min(chunk.start + 1 + chunk.count, sequence.prompt_length)
            following = sequence.tokens[chunk.start + 1 : end]
            yield ScoredRun(~index, ends[index] - chunk.count, following, params.prompt_logprobs or 0)


def logprobs_by_chunk(
    logits_RV: Tensor, wanted: Many[ScoredRun], buffers: StepBuffers
) -> Reads[dict[int, tuple[TokenLogprob, ...]]]:
    """By `chunk`, all in one read."""
    rows = [one.first + at for one in wanted for at in range(len(one.tokens))]
    tokens = [token for one in wanted for token in one.tokens]
    counts = [one.most for one in wanted for _ in one.tokens]
    told = iter((yield from logprobs_of(logits_RV, rows, tokens, counts, buffers)))
    return {one.chunk: tuple(islice(told, len(one.tokens))) for one in wanted}
