"""Which drafter a run has: what `--draft`, `--speculative-config` and `LLM(draft=...)` say, as a value. No torch."""

from dataclasses import dataclass, field
from enum import StrEnum

from afserve.config_ranges import Range
from afserve.errors import ConfigError, shown

DRAFT_TOKENS = Range(1, 16)
"""Of one sequence and step."""
DEFAULT_DRAFT = "off"
"""Of a run that says nothing."""
MTP_TOKENS = 3
"""Each is one more pass of the layer; DeepSeek-V3's and GLM's are trained for the first alone."""


class DraftMethod(StrEnum):
    """Who guesses: nobody; whoever is measured to pay; what followed the same words before, in this request (n-gram) or
    in other answers too (suffix); the checkpoint's own layer of multi-token prediction (mtp)."""

    OFF = "off"
    AUTO = "auto"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    MTP = "mtp"


_FORM = "METHOD or METHOD:N, such as ngram:4"


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """How many last tokens are looked for in what stands before them: at most, and at least 2."""

    shortest: int = 2
    longest: int = 4


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    """Behind a match of m tokens at most `factor` x m are guessed, while all of them together are as likely as `least`.
    `earlier` answers are searched too."""

    factor: float = 1.0
    least: float = 0.1
    earlier: bool = True


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """`tokens` is how many a sequence drafts in each step; None: as many as pay. `synthetic`, for benchmarks: how often
    the first, the first two, ... tokens of a draft that is right are left right. `passed` are keys that were given and
    change nothing."""

    method: DraftMethod = DraftMethod.OFF
    tokens: int | None = None
    ngram: NgramOptions = NgramOptions()
    suffix: SuffixOptions = SuffixOptions()
    synthetic: tuple[float, ...] = ()
    passed: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def parse(cls, text: str, spelled: str = "--draft") -> "DraftChoice":
        """Raises ConfigError that names what is wrong of `text` and what it may be."""
        method, colon, count = text.partition(":")
        if method not in tuple(DraftMethod):
            known = ", ".join(DraftMethod)
            raise ConfigError(
                f"{spelled}: {shown(method)} is not one of {known}; write {_FORM}", param="draft"
            )
        made = DraftMethod(method)
        if not colon:
            return cls(made)
        if made is DraftMethod.OFF:
            raise ConfigError(
                f"{spelled}: off takes no number; leave out {shown(':' + count)}", param="draft"
            )
        if not count.isascii() or not count.isdecimal() or not DRAFT_TOKENS.holds(int(count[:9])):
            low, high = DRAFT_TOKENS.low, DRAFT_TOKENS.high
            raise ConfigError(
                f"{spelled}: {shown(count)} is not a number of tokens from {low} to {high}; write {_FORM}",
                param="draft",
            )
        return cls(made, int(count))

    @property
    def most(self) -> int:
        """Tokens of one sequence and step."""
        if self.method is DraftMethod.OFF:
            return 0
        return self.tokens or (MTP_TOKENS if self.predicts else int(DRAFT_TOKENS.high))

    @property
    def predicts(self) -> bool:
        """Whether the checkpoint's layer of multi-token prediction is loaded and run, at every node."""
        return self.method is DraftMethod.MTP

    def __str__(self) -> str:
        """As `parse` reads it."""
        return self.method.value if self.tokens is None else f"{self.method}:{self.tokens}"


NO_DRAFTS = DraftChoice()
