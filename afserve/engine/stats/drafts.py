"""What a node says of tokens that were guessed for a step and verified by it."""

from dataclasses import dataclass
from typing import Any

from afserve.counters import Over, counter, group

_AT = "Tokens of drafts that were right, by their position in the draft."
_OF = "spec_decode_num_"


def _at(position: int) -> Any:
    labels = (("position", str(position)),)
    return counter(0, _AT, f"{_OF}accepted_tokens_per_pos", over=Over.MODEL, labels=labels)


@dataclass(frozen=True, slots=True)
class AcceptedByPosition:
    """As many as a draft may have tokens (`afserve.drafts.DRAFT_TOKENS`)."""

    p0: int = _at(0)
    p1: int = _at(1)
    p2: int = _at(2)
    p3: int = _at(3)
    p4: int = _at(4)
    p5: int = _at(5)
    p6: int = _at(6)
    p7: int = _at(7)
    p8: int = _at(8)
    p9: int = _at(9)
    p10: int = _at(10)
    p11: int = _at(11)
    p12: int = _at(12)
    p13: int = _at(13)
    p14: int = _at(14)
    p15: int = _at(15)


@dataclass(frozen=True, slots=True)
class DrafterStats:
    """Of one drafter. Each token of a draft is a row more of its step."""

    drafts: int = counter(
        0, "Times that a draft of this drafter was verified.", "drafter_drafts", where="drafts"
    )
    tokens: int = counter(0, "Tokens of its drafts, each a row of a step.", "drafter_tokens", where="drafts")
    accepted: int = counter(0, "Those that were right.", "drafter_accepted_tokens", where="drafts")


@dataclass(frozen=True, slots=True)
class StatsByDrafter:
    """By the names of drafters."""

    ngram: DrafterStats = group(DrafterStats(), drafter="ngram")
    suffix: DrafterStats = group(DrafterStats(), drafter="suffix")
    mtp: DrafterStats = group(DrafterStats(), drafter="mtp")
    eagle3: DrafterStats = group(DrafterStats(), drafter="eagle3")
    dflash: DrafterStats = group(DrafterStats(), drafter="dflash")
    dspark: DrafterStats = group(DrafterStats(), drafter="dspark")
    model: DrafterStats = group(DrafterStats(), drafter="model")
    forced: DrafterStats = group(DrafterStats(), drafter="forced")
    prediction: DrafterStats = group(DrafterStats(), drafter="prediction")


@dataclass(frozen=True, slots=True)
class DraftStats:
    verified: int = counter(0, "Times that a draft was verified.", f"{_OF}drafts", over=Over.MODEL)
    tokens: int = counter(0, "Tokens of these drafts.", f"{_OF}draft_tokens", over=Over.MODEL)
    accepted: int = counter(
        0, "Tokens of these drafts that were right.", f"{_OF}accepted_tokens", over=Over.MODEL
    )
    positions: AcceptedByPosition = AcceptedByPosition()
    drafters: StatsByDrafter = StatsByDrafter()


NO_DRAFTS = DraftStats()
