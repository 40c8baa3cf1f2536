"""How many tokens a verify step yields: measured mean accepted lengths by model, drafter and domain, and what they say
of a model that nobody measured.

A length counts the verified token, so it is 1 to K + 1 where K tokens are drafted. Opens no files.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afserve.errors import ConfigError, shown
from afserve.placement.planner.perf.drafting import DRAFTERS, DrafterCosts, Drafts
from afserve.placement.planner.perf.fields import TableFields

CODING, OTHER = "coding", "other"
MEASURED = 0.05
"""Spread of the accepted drafts of a model, drafter and domain that were measured: other prompts, temperatures and
versions. This and `ELSEWHERE` are assumptions."""
ELSEWHERE = 0.3
"""What another domain adds."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Mean accepted lengths of one drafter with 1, 2, 3 and so on drafted tokens. spread: as in `Drafts`. endless:
    `lengths` go on beyond their end, because they are computed."""

    drafter: DrafterCosts
    lengths: tuple[float, ...]
    spread: float
    source: str

    def drafts(self, tokens: int) -> Drafts:
        """Raises ConfigError where nobody measured so many."""
        if tokens > len(self.lengths):
            raise ConfigError(
                f"--draft {self.drafter.name}:{tokens}: accepted lengths are known for 1 to {len(self.lengths)} "
                "drafted tokens; draft fewer, or give --acceptance",
                param="draft",
            )
        return Drafts(self.drafter, tokens, self.lengths[tokens - 1], self.spread, self.source)


@dataclass(frozen=True, slots=True)
class MeasuredLengths:
    """One row of `configs/drafts.toml`."""

    model: str
    drafter: str
    domain: str
    lengths: tuple[float, ...]


def measured_lengths(source: str, table: Mapping[str, object]) -> tuple[MeasuredLengths, ...]:
    """Raises ConfigError naming `source`, key and value."""
    rows = []
    for place, row in enumerate(TableFields(source, table).items("measured")):
        fields = TableFields(f"{source}: [[measured]] {place + 1}", row if isinstance(row, Mapping) else {})
        name = fields.text("drafter")
        if name not in DRAFTERS:
            raise fields.refuse("drafter", f"must be one of {', '.join(DRAFTERS)}")
        lengths = _lengths(fields.items("lengths"))
        if lengths is None or min(lengths) <= 1:
            raise fields.refuse(
                "lengths", "must be numbers above 1, each at most one more than its place in the list"
            )
        rows.append(MeasuredLengths(fields.text("model"), name, fields.text("domain"), lengths))
    return tuple(rows)


def _lengths(found: Sequence[object]) -> tuple[float, ...] | None:
    lengths = tuple(float(one) for one in found if isinstance(one, int | float))
    inside = all(1 <= length <= place + 2 for place, length in enumerate(lengths))
    return lengths if inside and lengths and len(lengths) == len(found) else None


def typed_lengths(text: str, drafter: DrafterCosts, most: int) -> Accepted:
    """ "0.8": the chance that a drafted token is accepted when those before it were; "1.8,2.4,2.8": mean accepted
    lengths with 1, 2 and 3 drafted tokens. `most` tokens are drafted at most."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) == 1 and 0 <= found[0] <= 1:
        lengths = tuple(sum(found[0] ** place for place in range(count + 2)) for count in range(most))
        return Accepted(drafter, lengths, MEASURED, f"{found[0]:g} of the drafts accepted, as typed")
    lengths = _lengths(found) or ()
    if not lengths:
        raise ConfigError(
            f"--acceptance: {shown(text)} is neither a chance from 0 to 1 nor a list of mean accepted lengths with 1, "
            "2, 3 ... drafted tokens, each 1 to one more than it drafts; write 0.8 or 1.8,2.4,2.8",
            param="acceptance",
        )
    return Accepted(drafter, lengths, MEASURED, "accepted lengths as typed")


def expected_lengths(
    rows: Sequence[MeasuredLengths], model: str, drafter: DrafterCosts, domain: str
) -> Accepted | None:
    """Of the model itself, else of one of its family, else the mean over models; None where nobody measured this
    drafter. A model that was not measured has the spread of those that were on top."""
    mine = [row for row in rows if row.drafter == drafter.name]
    if not mine:
        return None
    own = [row for row in mine if row.model == model]
    kin = [row for row in mine if _family(row.model) == _family(model)]
    chosen = own or kin or mine
    between = 0.0 if own else _between(rows) * math.sqrt(1 + 1 / len(chosen))
    there = any(row.domain == domain for row in chosen)
    spread = math.hypot(MEASURED, between, 0.0 if there else ELSEWHERE)
    names, domains = ", ".join(row.model for row in chosen), " and ".join({row.domain: 0 for row in chosen})
    words = f"measured of {names} on {domains} prompts"
    if not own:
        words = f"nobody measured {model}: {'the mean of what was ' if len(chosen) > 1 else ''}{words}"
    if not there:
        words += "; other text is accepted less often"
    count = min(len(row.lengths) for row in chosen)
    return Accepted(drafter, tuple(_mean(chosen, place) for place in range(count)), spread, words)


def _family(model: str) -> str:
    """The letters that a name begins with: qwen of qwen3.5-397b-a17b."""
    letters = next((place for place, letter in enumerate(model) if not letter.isalpha()), len(model))
    return model[:letters]


def _mean(rows: Sequence[MeasuredLengths], place: int) -> float:
    """Geometric, of the accepted drafts."""
    logs = [math.log(row.lengths[place] - 1) for row in rows]
    return 1 + math.exp(sum(logs) / len(logs))


def _between(rows: Sequence[MeasuredLengths]) -> float:
    """One standard deviation of the log of accepted drafts between models of one drafter, over all lengths."""
    square = degrees = 0.0
    for name in {row.drafter for row in rows}:
        mine = [row for row in rows if row.drafter == name]
        count = min(len(row.lengths) for row in mine)
        for place in range(count):
            logs = [math.log(row.lengths[place] - 1) for row in mine]
            middle = sum(logs) / len(logs)
            square += sum((log - middle) ** 2 for log in logs) / count
        degrees += len(mine) - 1
    return math.sqrt(square / degrees) if degrees else ELSEWHERE
