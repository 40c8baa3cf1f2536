"""The one entry point of the optimizer: `balance(Problem) -> Balanced`, pure NumPy, always with a certificate.

This file chooses between a placement from nothing (`task`), a few moves from the current one (`improve`), and staying.
How each is found, how traffic is split, and the lower bound are in the files beside it. It knows no clock, no engine
and no tensors.
"""

from dataclasses import dataclass, replace

import numpy as np

from afserve.placement.optimizer.current import align, count_moves, relabel
from afserve.placement.optimizer.exchange import applies, exchanged
from afserve.placement.optimizer.local_search import Answer, rounds
from afserve.placement.optimizer.outcome import Balanced, Certificate
from afserve.placement.optimizer.problem import Floats, Ints, MovePrice, Problem, Throttle, unthrottled
from afserve.placement.optimizer.slot_budget import within_memory
from afserve.placement.optimizer.task import BalanceTask
from afserve.placement.placement import Placement

_EQUAL = 0.0005  # plans this close count as equally balanced: the one with fewer moves is taken
_NORMS = (3, 2, 4)  # the search minimises the 8th, 4th or 16th powers of the node levels
_SMALL = 4_000  # slots up to which all norms are tried for one known load
_STAGES = (0.1, 0.3, 1.0)  # parts of the budget after which a priced search is looked at


def balance(problem: Problem, throttle: Throttle = unthrottled) -> Balanced:
    """The best placement found, and proof of how good it is. Pure: the same problem gives the same answer.

    One known load with a spare slot per node is placed exactly (gap 0). Several scenarios are placed for their
    mean and variance with room to shift traffic. With a current placement the answer keeps to the budget of
    moves, and stays where moving does not pay. Moves that a dead node or a protected expert forces are made
    whatever the budget. `throttle` is called between the steps of a search from a current placement.
    """
    if problem.memory is not None:
        return within_memory(problem, problem.memory, balance)
    task = BalanceTask(problem, throttle)
    if problem.current is None:
        answer = task.fresh()
        return _outcome(task, answer, _certificate(task, answer))
    return _from_current(task, problem.current)


@dataclass(frozen=True, slots=True)
class _Choice:
    """One way on from what stands."""

    answer: Answer
    value: float
    moves: int
    busiest: int

    def net(self, stay: "_Choice", price: MovePrice | None) -> float:
        """Seconds of serving won over the horizon, less those that moving costs; without a price, the fraction won."""
        gain = 1.0 - self.value / stay.value if stay.value > 0 else 0.0
        return gain if price is None else gain * price.horizon_s - price.move_seconds(self.busiest)


def _from_current(task: BalanceTask, current: Placement) -> Balanced:
    problem = task.problem
    old = _old_slots(current, task.room_N)
    start = task.adopted(current)
    stay = _choice(task, old, (start, task.split_rows(start)))
    budget = start.size if problem.moves is None else max(0, problem.moves - stay.moves)
    ways = [stay, *_searched(task, old, start, budget)]
    if problem.moves is None:
        ways.append(_relabelled(task, old))
    nets = [way.net(stay, problem.price) for way in ways]
    equal = _EQUAL * (1.0 if problem.price is None else problem.price.horizon_s)
    best = min(
        (w for w, net in zip(ways, nets, strict=True) if net >= max(nets) - equal), key=lambda w: w.moves
    )
    return _outcome(task, best.answer, _verdict(task, best, stay))


def _searched(task: BalanceTask, old: Ints, start: Ints, budget: int) -> list[_Choice]:
    """Some, more and all of the budget, so that a price has a choice; a small known load with several norms."""
    if budget == 0:
        return []
    stages = _STAGES if task.problem.price is not None or task.problem.moves is None else _STAGES[-1:]
    ways = []
    known = len(task.wary_C) == 1
    for squarings in _NORMS if known and start.size <= _SMALL else _NORMS[:1]:
        search, spent = task.search(start, squarings), 0
        for stage in stages:
            spent += search.run(int(stage * budget) - spent, rounds=rounds(start))
            ways.append(_choice(task, old, (search.slot.copy(), task.split_rows(search.slot))))
    if applies(start, task.mean_LE, task.room_N, task.pace_N):
        budgets = [int(stage * min(budget, start.size)) for stage in stages]
        found = exchanged(start, task.mean_LE, budgets, task.throttle)
        ways += [_choice(task, old, (slot, task.split_rows(slot))) for slot in found]
    return ways


def _relabelled(task: BalanceTask, old: Ints) -> _Choice:
    """A plan from nothing, its nodes renamed so that as many experts as possible stay."""
    slot, share = task.fresh()
    kind_N = task.kinds(task.avoid_N)
    origin_LN = relabel(old, slot, task.experts, kind_N)[:, :, None]
    slot, share = np.take_along_axis(slot, origin_LN, 1), np.take_along_axis(share, origin_LN, 1)
    return _choice(task, old, align(old, slot, share))


def _choice(task: BalanceTask, old: Ints, answer: Answer) -> _Choice:
    task.throttle()
    moves_LN = count_moves(old, answer[0], task.experts)
    return _Choice(
        answer, float(task.objective(answer).sum()), int(moves_LN.sum()), int(moves_LN.sum(0).max())
    )


def _old_slots(current: Placement, room_N: Ints) -> Ints:
    """What the live nodes hold now, whether or not it is still usable."""
    old = current.slot_array().copy()
    old[:, room_N == 0] = -1
    return old


def _certificate(task: BalanceTask, answer: Answer) -> Certificate:
    largest, bound = task.largest(*answer), task.bound()
    proof = Certificate(_tuple(largest), _tuple(np.minimum(bound, largest)))
    if task.problem.time is None:
        return proof
    seconds, least = task.step_seconds(*answer, task.problem.time), task.seconds_bound(task.problem.time)
    return replace(proof, seconds=_tuple(seconds), seconds_bound=_tuple(np.minimum(least, seconds)))


def _verdict(task: BalanceTask, best: _Choice, stay: _Choice) -> Certificate:
    price = task.problem.price
    gain = 1.0 - best.value / stay.value if stay.value > 0 else 0.0
    cost = 0.0 if price is None else price.move_seconds(best.busiest)
    worth = best is not stay
    if not worth:
        reason = "not worth moving: no plan within the budget gains more than it costs"
    elif price is None:
        reason = f"{best.moves} moves lower the largest load by {gain:.2%}"
    else:
        won = f"{gain * price.horizon_s:.3g} s over {price.horizon_s:g} s"
        reason = f"{best.moves} moves win {won} for {cost:.3g} s of moving"
    if stay.moves:
        reason += f"; {stay.moves} moves were forced by lost or protected experts or missing copies"
    return replace(
        _certificate(task, best.answer),
        moves=best.moves,
        busiest=best.busiest,
        gain=gain,
        move_seconds=cost,
        worth_moving=worth,
        reason=reason,
    )


def _outcome(task: BalanceTask, answer: Answer, proof: Certificate) -> Balanced:
    wide = 0 if task.problem.current is None else task.problem.current.slots_per_node()
    width_N = np.minimum(
        task.problem.nodes.slots, max(task.experts, wide)
    )  # more slots than experts stay unbuilt
    width_LN = np.broadcast_to(width_N, (task.layers, len(width_N)))
    slot, share = answer
    short = int(width_LN.max(initial=0)) - slot.shape[2]
    if short > 0:
        slot = np.pad(slot, ((0, 0), (0, 0), (0, short)), constant_values=-1)
        share = np.pad(share, ((0, 0), (0, 0), (0, short)))
    return Balanced(slot, share, width_LN, task.experts, proof)


def _tuple(values: Floats) -> tuple[float, ...]:
    return tuple(values.tolist())
