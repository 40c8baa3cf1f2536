"""Measures served steps that verify drafts: one colocated node, all requests together, the checkpoint's own drafts.

Such a step is another one than a token without drafts, of which one native call makes several.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from afserve.cli.bench.case import Case
from afserve.cli.bench.figures import BatchFigures, figures
from afserve.cli.bench.ours import WARM_UP, Shape, run_batch
from afserve.cli.bench.stages import Row
from afserve.config import ModelSource
from afserve.doors.llm import LLM
from afserve.drafts import DraftChoice, DraftMethod
from afserve.engine.stats import AttentionStats
from afserve.launch.plan.drafting import planned_spec
from afserve.member import attention_node

_TOLD_WITHIN = 20  # seconds


@dataclass(frozen=True, slots=True)
class DraftedTurn:
    """`figures` of so many requests at once; a sequence's step yielded so many tokens."""

    requests: int
    figures: BatchFigures
    yielded: float

    @property
    def seconds(self) -> float:
        """From a step to the next, while all requests decode."""
        rate = self.figures.tokens_per_second
        return self.yielded * (self.requests / rate if rate else self.figures.tpot)


def drafted_turns(case: Case, draft: str) -> Iterator[DraftedTurn]:
    """With drafts such as mtp:2, or `off`: on one start, all sizes in turn, as often as the case repeats."""
    with Shape(colocated=True, attention=1, share_cores=False, draft=draft).llm(case) as llm:
        run_batch(llm, case, WARM_UP, seed=-1)
        before = _verified(llm)
        for seed in range(case.repeats):
            for batch in case.batches:
                found = figures(run_batch(llm, case, batch, seed))
                after = _verified(llm)
                drafted, right = (now - then for now, then in zip(after, before, strict=True))
                yield DraftedTurn(batch, found, 1 + right / drafted if drafted else 1.0)
                before = after


def drafted_rows(source: ModelSource, case: Case, drafts: Sequence[int]) -> Iterator[Row]:
    """With each of these numbers of drafts; nothing where the checkpoint has no layer of multi-token prediction."""
    if not planned_spec(source, DraftChoice(DraftMethod.AUTO)).predictors:
        return
    for tokens in drafts:
        found: dict[int, list[float]] = {}
        for turn in drafted_turns(case, f"{DraftMethod.MTP}:{tokens}"):
            found.setdefault(turn.requests, []).append(turn.seconds)
        for requests, seconds in found.items():
            yield {
                "part": "drafts", "requests": requests, "context": case.prompt_len + case.output_len / 2,
                "drafts": tokens, "seconds": median(seconds),
            }  # fmt: skip


def _verified(llm: LLM) -> tuple[int, int]:
    """Drafts that were verified since the start, and their tokens that were right, once the node has told of its last
    step: nothing changes for a second. Raises TimeoutError where it goes on changing."""
    told, since, deadline = (-1, -1), time.monotonic(), time.monotonic() + _TOLD_WITHIN
    while time.monotonic() - since < 1:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the node's counts still change {_TOLD_WITHIN} s after its last request")
        member = llm.run.controller.members.last_at(attention_node(0))
        assert member is not None and isinstance(member.stats, AttentionStats), "it serves"
        now = member.stats.drafts.verified, member.stats.drafts.accepted
        if now != told:
            told, since = now, time.monotonic()
        time.sleep(0.05)
    return told
