"""DSpark heads as their config.json describes them, in speculators' form: DFlash heads whose guesses know the token
before them, and which say how sure they are.

To the scores of a place those of a low-rank Markov head are added, by the token that was guessed for the place before;
a confidence head says how likely the guess is right. Sources: DSpark (arXiv 2607.05147), speculators' models/dspark,
and vLLM's qwen3_dspark.py.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import ClassVar

from afserve.families.drafters.dflash import DflashSpec, of_speculators
from afserve.families.drafters.heads import Shape, fitting, open_head
from afserve.spec import ModelSpec

_READ = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
BEFORE, AFTER, SURE = "markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj"


@dataclass(frozen=True, slots=True)
class DsparkSpec(DflashSpec):
    """rank   of the Markov head; 0: there is none
    sure   numbers that the confidence head reads: a row, maybe with the Markov head's of the token before; 0: none
    """

    method: ClassVar[str] = "dspark"
    called: ClassVar[str] = "a DSpark head"

    rank: int = 0
    sure: int = 0

    def needed_tensors(self, stems: Collection[str]) -> dict[str, Shape]:
        found = DflashSpec.needed_tensors(self, stems)
        if self.rank:
            found |= {f"{BEFORE}.weight": (self.vocab_size, self.rank)}
            found |= {f"{AFTER}.weight": (self.draft_vocab, self.rank)}
        return found | ({f"{SURE}.weight": (1, self.sure), f"{SURE}.bias": (1,)} if self.sure else {})


def load_dspark(folder: str, target: ModelSpec) -> DsparkSpec:
    """Of a head for `target`. Raises CheckpointError or ConfigError that name what is wrong, or does not fit."""
    given = open_head(folder, DsparkSpec)
    if not given.has("speculators_model_type"):
        raise given.error(
            "speculators_model_type: missing: DSpark heads are run in speculators' form",
            "speculators_model_type",
        )
    given.known_only("speculators_model_type", "dspark")
    given.known_only("markov_head_type", "vanilla")
    base, rank = of_speculators(given, *_READ, newest=True), given.integer("markov_rank", default=256)
    sure = base.hidden if given.flag("enable_confidence_head", True) else 0
    if sure and given.flag("confidence_head_with_markov", True):
        if not rank:
            raise given.refuse("markov_rank", "leaves nothing that confidence_head_with_markov could read")
        sure += rank
    own = {field.name: getattr(base, field.name) for field in fields(base)}
    return fitting(given, DsparkSpec(**own, rank=rank, sure=sure), target)
