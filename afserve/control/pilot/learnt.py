"""What a pilot has learnt, as lists of numbers: a controller that follows another one goes on with it.

How wrong it was, by how much pools are too large on purpose, and what nodes were measured at: a few thousand bytes of
JSON. Rates and lengths of what comes are no part of it: these are seen anew within minutes. Values in, values out.
"""

import math
from collections.abc import Mapping
from dataclasses import astuple
from typing import Final

from afserve.control.pilot.judge import LEAST_ROOM, MOST_ROOM, NEWEST_ERRORS, Judge
from afserve.control.pilot.measured import MeasuredModel, NodeSeconds, StepCost

Learnt = Mapping[str, list[float]]
_MUCH = 1e18
# (how many numbers at least, at most; between which values)
_KINDS: Final = {
    "ttft_errors": (0, NEWEST_ERRORS, 0.0, 1e3),
    "ttft_standing": (0, NEWEST_ERRORS, 0.0, 1e3),
    "tpot_errors": (0, NEWEST_ERRORS, 0.0, 1e3),
    "tpot_standing": (0, NEWEST_ERRORS, 0.0, 1e3),
    "shares": (2, 2, -10.0, 10.0),
    "corrections": (3, 3, -1.0, 1.0),
    "headrooms": (2, 2, LEAST_ROOM, MOST_ROOM),
    "requests": (4, 4, 0.0, _MUCH),
    "rates": (7, 7, 0.0, _MUCH),
    "decode_steps": (7, 7, 0.0, _MUCH),
    "expert_steps": (7, 7, 0.0, _MUCH),
}


def learnt_of(judge: Judge, model: MeasuredModel) -> Learnt:
    rooms = judge.read_room, judge.made_room
    return {
        "ttft_errors": [*judge.ttft.errors],
        "ttft_standing": [*judge.ttft.standing],
        "tpot_errors": [*judge.tpot.errors],
        "tpot_standing": [*judge.tpot.standing],
        "shares": [judge.ttft.share, judge.tpot.share],
        "corrections": [judge.first.log, judge.rest.log, judge.reading.log],
        "headrooms": [room.factor for room in rooms],
        "requests": [number for room in rooms for number in (room.noted, room.usual)],
        "rates": [*astuple(model.rates)],
        "decode_steps": [*model.decode.sums, model.decode.step, model.decode.each],
        "expert_steps": [*model.experts.sums, model.experts.step, model.experts.each],
    }


def recall(said: object, judge: Judge, model: MeasuredModel) -> None:
    """Goes on from there. Raises ValueError where anything of it cannot be; nothing is taken then."""
    found = {name: _checked(name, said) for name in _KINDS}
    for name, interval in (("ttft", judge.ttft), ("tpot", judge.tpot)):
        interval.errors.extend(found[f"{name}_errors"])
        interval.standing.extend(found[f"{name}_standing"])
    judge.ttft.share, judge.tpot.share = found["shares"]
    judge.first.log, judge.rest.log, judge.reading.log = found["corrections"]
    judge.read_room.factor, judge.made_room.factor = found["headrooms"]
    read, made = judge.read_room, judge.made_room
    read.noted, read.usual, made.noted, made.usual = found["requests"]
    model.begin_with(
        NodeSeconds(*found["rates"]), _step_cost(found["decode_steps"]), _step_cost(found["expert_steps"])
    )


def _step_cost(numbers: list[float]) -> StepCost:
    *sums, step, each = numbers
    return StepCost(tuple(sums), step, each)


def _checked(name: str, said: object) -> list[float]:
    fewest, most, low, high = _KINDS[name]
    numbers = said.get(name) if isinstance(said, Mapping) else None
    if not isinstance(numbers, list) or not fewest <= len(numbers) <= most:
        raise ValueError(f"{name}: {fewest} to {most} numbers are needed")
    for one in numbers:
        if not isinstance(one, int | float) or not (math.isfinite(one) and low <= one <= high):
            raise ValueError(f"{name}: {one!r} is no number from {low:g} to {high:g}")
    return [float(one) for one in numbers]
