"""Which drafter a run has: what `--draft`, `--speculative-config` and `LLM(draft=...)` say, as a value. No torch."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from afserve.config_ranges import Range
from afserve.errors import ConfigError, shown

DRAFT_TOKENS = Range(1, 16)
"""Of one sequence and step."""
DEFAULT_DRAFT = "off"
"""Of a run that says nothing."""
MTP_TOKENS = 3
"""Each is one more pass of the layer; DeepSeek-V3's and GLM's are trained for the first alone."""

MODEL_TOKENS = 8
"""Each is one more pass of a draft model."""

HEAD, DRAFT_MODEL = "head", "draft model"


class Guess(NamedTuple):
    """The likeliest next token, -1 where there is none, and how likely it is right."""

    token: int
    chance: float


NO_GUESS = Guess(-1, 0.0)


class DraftMethod(StrEnum):
    """Who guesses: nobody; whoever is measured to pay; what followed the same words before, in this request (n-gram) or
    in other answers too (suffix); the checkpoint's own layer of multi-token prediction (mtp); a head that was trained
    for the model and stands beside it, token by token (eagle3) or a block at once (dflash, dspark); a small model of
    the same tokenizer (model)."""

    OFF = "off"
    AUTO = "auto"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    MTP = "mtp"
    EAGLE3 = "eagle3"
    DFLASH = "dflash"
    DSPARK = "dspark"
    MODEL = "model"


_FORM = "METHOD or METHOD:N, such as ngram:4"


def token_count(text: str, spelled: str, form: str) -> int:
    """How many tokens are drafted. Raises ConfigError that says what may be written, such as `form`."""
    if not text.isascii() or not text.isdecimal() or not DRAFT_TOKENS.holds(int(text[:9])):
        low, high = DRAFT_TOKENS.low, DRAFT_TOKENS.high
        raise ConfigError(
            f"{spelled}: {shown(text)} is not a number of tokens from {low:g} to {high:g}; write {form}",
            param="draft",
        )
    return int(text)


class FolderMethod(NamedTuple):
    """A method whose weights are in a folder of their own: `what` is there, its name for vLLM, and whether one pass
    guesses all tokens of a draft."""

    what: str
    vllm: str
    at_once: bool = False


BESIDE = {
    DraftMethod.EAGLE3: FolderMethod(HEAD, "eagle3"),
    DraftMethod.DFLASH: FolderMethod(HEAD, "dflash", at_once=True),
    DraftMethod.DSPARK: FolderMethod(HEAD, "dspark", at_once=True),
    DraftMethod.MODEL: FolderMethod(DRAFT_MODEL, "draft_model"),
}
"""All such methods: whoever needs to know one asks here."""


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
    change nothing. `folder`: of a head or a draft model, read on the hosts of attention nodes alone."""

    method: DraftMethod = DraftMethod.OFF
    tokens: int | None = None
    ngram: NgramOptions = NgramOptions()
    suffix: SuffixOptions = SuffixOptions()
    synthetic: tuple[float, ...] = ()
    passed: tuple[str, ...] = field(default=(), compare=False)
    folder: str = ""

    @classmethod
    def parse(cls, text: str, spelled: str = "--draft") -> "DraftChoice":
        """Raises ConfigError that names what is wrong of `text` and what it may be."""
        method, colon, count = text.partition(":")
        if method not in tuple(DraftMethod):
            known = ", ".join(DraftMethod)
            raise ConfigError(
                f"{spelled}: {shown(method)} is not one of {known}; write {_FORM}", param="draft"
            )
        made, folder = DraftMethod(method), ""
        if made in BESIDE:
            folder, colon, count = _folder_and_count(count)
            if not folder:
                what = BESIDE[made].what
                raise ConfigError(
                    f"{spelled}: {made} needs the folder of a {what}; write {made}:FOLDER or {made}:FOLDER:N",
                    param="draft",
                )
        if not colon:
            return cls(made, folder=folder)
        if made is DraftMethod.OFF:
            raise ConfigError(
                f"{spelled}: off takes no number; leave out {shown(':' + count)}", param="draft"
            )
        return cls(made, token_count(count, spelled, _FORM), folder=folder)

    @property
    def most(self) -> int:
        """Tokens of one sequence and step."""
        if self.method is DraftMethod.OFF:
            return 0
        if self.method is DraftMethod.MODEL:
            return self.tokens or MODEL_TOKENS
        few = self.follows and not self.at_once
        return self.tokens or (MTP_TOKENS if few else int(DRAFT_TOKENS.high))

    @property
    def predicts(self) -> bool:
        """Whether the checkpoint's layer of multi-token prediction is loaded and run, at every node."""
        return self.method is DraftMethod.MTP

    @property
    def follows(self) -> bool:
        """Whether somebody guesses behind each step: a layer over its rows, or a model over its tokens."""
        return self.predicts or bool(self.folder)

    @property
    def head(self) -> str:
        """The folder of a head, which reads rows of the model's layers."""
        return self._folder_of(HEAD)

    @property
    def at_once(self) -> bool:
        """Whether one pass guesses all tokens of a draft."""
        return self.method in BESIDE and BESIDE[self.method].at_once

    @property
    def model(self) -> str:
        """The folder of a draft model, which reads tokens alone."""
        return self._folder_of(DRAFT_MODEL)

    def _folder_of(self, what: str) -> str:
        return self.folder if self.method in BESIDE and BESIDE[self.method].what == what else ""

    def __str__(self) -> str:
        """As `parse` reads it."""
        told = f"{self.method}:{self.folder}" if self.folder else self.method.value
        return told if self.tokens is None else f"{told}:{self.tokens}"


def _folder_and_count(text: str) -> tuple[str, str, str]:
    """A folder may have colons, too: what is behind the last one is a number, or a part of the name."""
    folder, colon, count = text.rpartition(":")
    return (folder, colon, count) if colon and count.isdecimal() else (text, "", "")


NO_DRAFTS = DraftChoice()
