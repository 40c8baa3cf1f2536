"""A `Problem` as arrays, and the ways to answer it from nothing. It does not choose between moving and staying."""

import numpy as np
from numpy.typing import NDArray

from afserve.placement.optimizer.bound import lower_bound
from afserve.placement.optimizer.current import adopt
from afserve.placement.optimizer.domains import DomainSpans, apart
from afserve.placement.optimizer.improve import Search
from afserve.placement.optimizer.local_search import Answer, LocalSearch, rounds
from afserve.placement.optimizer.packing import pack
from afserve.placement.optimizer.problem import Floats, Ints, Problem, Throttle, TimeModel, unthrottled
from afserve.placement.optimizer.racks import over_racks
from afserve.placement.optimizer.robust import replicate, spread
from afserve.placement.optimizer.split import node_load, split
from afserve.placement.optimizer.uncertainty import uncertainty, with_unseen
from afserve.placement.placement import FREE, Placement

_NEAR = 0.02  # above the bound: a search of copies that already are this good gains less than it takes
_DENSE_WORK = 300_000_000  # slots x nodes x experts, up to which an exact split takes about a second


class BalanceTask:
    """Owns no state beyond the problem's arrays. `room_N` is the usable width of every layer here."""

    def __init__(self, problem: Problem, throttle: Throttle = unthrottled) -> None:
        self.problem, self.throttle = problem, throttle
        self.load_CLE, self.weight_C = problem.load_CLE, problem.weights
        prior = _prior(problem)
        self._doubtful = prior >= 1
        self.wary_CLE, self.wary_C = with_unseen(self.load_CLE, self.weight_C, prior)
        self.layers, self.experts = self.load_CLE.shape[1:]
        self.room_N, self.pace_N = problem.nodes.usable_slots().clip(max=self.experts), problem.nodes.pace()
        self.mean_LE = np.tensordot(self.wary_C, self.wary_CLE, 1)
        self.copies = problem.copies
        self.domain_N = problem.nodes.domains(self.experts, self.copies)
        self.least_LE = np.full((self.layers, self.experts), self.copies, dtype=np.int64)
        for layer, expert in problem.protect:
            self.least_LE[layer, expert] = max(2, self.copies)

    def fresh(self) -> Answer:
        """From nothing: exact where one load is known, else spread against surprises."""
        if len(self.wary_CLE) > 1 or self.problem.protect or self.copies > 1:
            answer = self._wary()
        else:
            answer = self._known(self.mean_LE)
        if self.problem.time is not None:
            answer = self._quickest(answer, self.problem.time)
        return answer[0], answer[1]

    def adopted(self, current: Placement) -> Ints:
        """slot_LNS to start from: the current placement on the usable slots, with the copies that it must have."""
        if self.copies == 1:
            return adopt(current, self.room_N, self.least_LE, self.mean_LE)
        return self._apart(adopt(current, self.room_N, self.least_LE * 0, self.mean_LE))

    def _apart(self, slot_LNS: Ints) -> Ints:
        return apart(slot_LNS, self.mean_LE, self.copies, self.domain_N, self.room_N)

    def split_rows(self, slot_LNS: Ints, tolerance: float = 1e-8) -> Floats:
        """Optimal for the one load; for several, for the mean and the variance that they show."""
        risk_LE = None
        if len(self.wary_CLE) > 1:
            variance_LE = np.tensordot(self.wary_C, (self.wary_CLE - self.mean_LE) ** 2, 1)
            risk_LE = variance_LE / np.maximum(self.mean_LE**2, 1e-300)
        quick = self.copies > 1 and slot_LNS.size * slot_LNS.shape[1] * self.experts > _DENSE_WORK
        return split(slot_LNS, self.mean_LE, self.pace_N, risk_LE, tolerance=tolerance, quick=quick)

    def search(self, slot_LNS: Ints, squarings: int = 3) -> Search:
        spans = DomainSpans(slot_LNS, self.experts, self.copies, self.domain_N) if self.copies > 1 else None
        return Search(
            slot_LNS,
            self.wary_CLE,
            self.wary_C,
            self.pace_N,
            self.least_LE,
            self.room_N,
            squarings,
            self.throttle,
            spans,
        )

    def largest(self, slot_LNS: Ints, share_LNS: Floats) -> Floats:
        """max_L: rows per unit of speed on the fullest live node, the weighted mean over scenarios."""
        live = self.room_N > 0
        worst = [
            (node_load(slot_LNS, share_LNS, load) / self.pace_N)[:, live].max(1) for load in self.load_CLE
        ]
        largest: Floats = np.tensordot(self.weight_C, np.array(worst), 1)
        return largest

    def bound(self) -> Floats:
        bound: Floats = np.tensordot(self.weight_C, [self._bound(load) for load in self.load_CLE], 1)
        return bound

    def step_seconds(self, slot_LNS: Ints, share_LNS: Floats, model: TimeModel) -> Floats:
        """seconds_L of the slowest node, the weighted mean over scenarios."""
        layer, live = np.arange(self.layers)[:, None, None], self.room_N > 0
        slowest = []
        for load_LE in self.load_CLE:
            rows = self._step_rows(load_LE, model)[layer, np.maximum(slot_LNS, 0)] * share_LNS
            cost = np.where(slot_LNS == FREE, 0.0, model.cost(rows)).sum(2) / self.pace_N
            slowest.append(model.fixed + cost[:, live].max(1))
        seconds: Floats = np.tensordot(self.weight_C, np.array(slowest), 1)
        return seconds

    def seconds_bound(self, model: TimeModel) -> Floats:
        """Costs are concave in rows, 0 at 0: an expert's pieces cost at least the whole, and bound as loads do."""
        costs = [self._bound(model.cost(self._step_rows(load, model))) for load in self.load_CLE]
        bound: Floats = model.fixed + np.tensordot(self.weight_C, costs, 1)
        return bound

    def objective(self, answer: Answer) -> Floats:
        """What is minimised, per layer: seconds where a time model is given, else the largest load."""
        model = self.problem.time
        return self.largest(*answer) if model is None else self.step_seconds(*answer, model)

    def _bound(self, load_LE: Floats) -> Floats:
        return lower_bound(load_LE, self.room_N, self.pace_N, self.copies)

    def _step_rows(self, load_LE: Floats, model: TimeModel) -> Floats:
        rows: Floats = load_LE * (model.rows / np.maximum(load_LE.sum(1, keepdims=True), 1e-300))
        return rows

    def _known(self, load_LE: Floats) -> Answer:
        slot, share, exact_L = pack(load_LE, self.room_N, self.pace_N)
        if not exact_L.all():
            local_search = LocalSearch(
                load_LE[~exact_L],
                self.least_LE[~exact_L],
                self.room_N,
                self.pace_N,
                self.problem.nodes.racks(),
            )
            slot[~exact_L], share[~exact_L] = local_search.run()
        slot, racks = fill_spare(slot, load_LE, self.room_N), self.problem.nodes.racks()
        if np.ptp(racks) == 0:
            return slot, share
        return over_racks(slot, share, self.experts, racks, self.kinds(racks * 0))

    @property
    def avoid_N(self) -> Ints:
        """What replicas of one expert should not share: the domain of copies, or a rack where that is a node."""
        every_node = len(np.unique(self.domain_N)) == len(self.domain_N)
        return self.problem.nodes.racks() if self.copies == 1 or every_node else self.domain_N

    def kinds(self, rack_N: Ints) -> Ints:
        """kind_N: equal numbers for nodes that may trade places: equal slots, speed and rack."""
        traits = np.stack([self.room_N, self.pace_N, rack_N])
        kind_N: Ints = np.unique(traits, axis=1, return_inverse=True)[1].ravel()
        return kind_N

    def _wary(self) -> Answer:
        slot = self._spread(self.wary_CLE, self.wary_C, self.least_LE)
        if self.copies > 1:
            slot = self._apart(slot)
        answer = slot, self.split_rows(slot)
        if self.copies == 1 or len(self.wary_CLE) > 1 or self._near(answer):
            return answer
        search = self.search(slot)
        search.run(slot.size, rounds=rounds(slot))
        return search.slot, self.split_rows(search.slot)

    def _near(self, answer: Answer) -> bool:
        """Whether no search can gain much on it."""
        return bool((self.largest(*answer) <= self.bound() * (1 + _NEAR)).all())

    def _spread(self, load_CLE: Floats, weight_C: Floats, least_LE: Ints) -> Ints:
        live = int((self.room_N > 0).sum())
        replicas = replicate(np.tensordot(weight_C, load_CLE, 1), least_LE, int(self.room_N.sum()), live)
        return spread(
            load_CLE, weight_C, replicas, self.room_N, self.pace_N, self.avoid_N, whole_first=self._doubtful
        )

    def _quickest(self, answer: Answer, model: TimeModel) -> Answer:
        """Per layer the quickest of: balanced rows, balanced costs, balanced costs with every expert whole."""
        cost_LE = np.tensordot(
            self.weight_C, [model.cost(self._step_rows(w, model)) for w in self.load_CLE], 1
        )
        answers = (
            [answer]
            if self.problem.protect or self.copies > 1
            else [answer, self._known(cost_LE), self._whole(cost_LE)]
        )
        times = np.array([self.step_seconds(*a, model) for a in answers])
        pick_L = times.argmin(0)
        row = np.arange(self.layers)
        return np.array([a[0] for a in answers])[pick_L, row], np.array([a[1] for a in answers])[pick_L, row]

    def _whole(self, cost_LE: Floats) -> Answer:
        one = np.ones((self.layers, self.experts), dtype=np.int64)
        racks = self.problem.nodes.racks()
        slot = spread(cost_LE[None], np.ones(1), one, self.room_N, self.pace_N, racks)
        search = Search(slot, cost_LE[None], np.ones(1), self.pace_N, one, self.room_N)
        search.run(slot.size, copies=False, rounds=rounds(search.slot))
        return fill_spare(search.slot, cost_LE, self.room_N), (search.slot != FREE) * 1.0


def _prior(problem: Problem) -> float:
    """The weight of what nobody has seen: as asked, else by how well several scenarios agree."""
    if problem.prior >= 0:
        return problem.prior
    return uncertainty(problem.load_CLE) if len(problem.load_CLE) > 1 else 0.0


def fill_spare(slot_LNS: Ints, load_LE: Floats, room_N: Ints) -> Ints:
    """Empty slots get replicas without traffic, hottest experts first: a later split can use them."""
    experts = load_LE.shape[1]
    slot = slot_LNS.copy()
    usable: NDArray[np.bool_] = np.arange(slot.shape[2]) < room_N[:, None]
    hot_LE = np.argsort(-load_LE, axis=1)
    for place in range(slot.shape[2]):
        for shift in range(experts):
            empty_LN = (slot[:, :, place] == FREE) & usable[:, place]
            if not empty_LN.any():
                break
            turn_LN = (np.cumsum(empty_LN, 1) - 1 + shift) % experts
            expert_LN = np.take_along_axis(hot_LE, turn_LN, 1)
            fits = empty_LN & ~(slot == expert_LN[:, :, None]).any(2)
            slot[:, :, place] = np.where(fits, expert_LN, slot[:, :, place])
    return slot
