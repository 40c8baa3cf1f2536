"""Greedy tokens of topologies beside those of the first one: the same, near, or others.

Products of other shapes are summed in another order, so two tokens of almost the same probability may change places.
Where two answers part, the reference says how much likelier its own token was: below NEAR nats they are near, and what
follows such a place is no longer compared.
"""

from collections.abc import Sequence

Row = dict[str, object]
NEAR = 0.15  # nats, of logits in bfloat16 near 20: one step of them is 0.125


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """A row for each topology whose tokens were printed, beside the first one's."""
    told = [row for row in rows if "tokens" in row]
    return [_verdict(told[0], row) for row in told[1:]]


def _verdict(reference: Row, other: Row) -> Row:
    gaps = [
        _gap(a, b, top) for a, b, top in zip(_lists(reference), _lists(other), _tops(reference), strict=True)
    ]
    parted = [gap for gap in gaps if gap is not None]
    verdict = "same" if not parted else "near" if max(parted) < NEAR else "others"
    return {
        "step": "compare", "topology": other["topology"], "beside": reference["topology"], "verdict": verdict,
        "answers": len(gaps), "parted": len(parted), "largest_gap": round(max(parted, default=0.0), 4),
    }  # fmt: skip


def _gap(own: Sequence[int], other: Sequence[int], top: Sequence[Sequence[Sequence[float]]]) -> float | None:
    """How many nats likelier the reference's token was where the two part; None where they do not. Infinite where the
    other token is not among the best that the reference told."""
    for at, (a, b) in enumerate(zip(own, other, strict=False)):
        if a != b:
            known = {int(token): logprob for token, logprob in top[at]}
            return known[a] - known[b] if a in known and b in known else float("inf")
    return None if len(own) == len(other) else float("inf")


def _lists(row: Row) -> list[list[int]]:
    found = row["tokens"]
    assert isinstance(found, list)
    return found


def _tops(row: Row) -> list[list[list[list[float]]]]:
    found = row["top"]
    assert isinstance(found, list)
    return found
