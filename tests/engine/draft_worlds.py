"""Worlds that say what drafts cost and how often they are right, and what serving takes in them. Their clock is theirs.

The truth is always the same token, and a wrong guess another. Work is so many tokens, in phases; whoever serves them
meets the same phases, whatever it drafts.
"""

import random
from collections.abc import Sequence as Many
from dataclasses import dataclass

from afserve.engine.draft.adaptive_price import AdaptivePrice
from afserve.engine.draft.drafter import NO_DRAFT, Draft
from afserve.engine.draft.drafting import Drafting
from afserve.engine.draft.layer_drafter import WantedLengths
from afserve.engine.draft.layer_trials import LayerTrials
from afserve.engine.draft.price import Candidate, DraftPrice, FixedPrice, RanStep
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.sequence import Sequence

RIGHT, WRONG, LONGEST = 7, 3, 3
PARAMS = SamplingParams(max_tokens=1000)


@dataclass(frozen=True, slots=True)
class Phase:
    """For so many `tokens`. A guess of a text or of the layer is right so often, each token by itself; `found`: of the
    texts, the share that something stands in."""

    tokens: int
    sequences: int
    text: float
    found: float
    layer: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: of a step, of each of its rows, of a search and of reading a new text before its first, of a pass of the
    layer; `ask`: of looking at a step. A request has `life` tokens."""

    step: float
    row: float
    search: float
    read: float
    layer: float
    life: int
    ask: float = 0.0

    def plain(self, rows: int) -> float:
        return self.step + self.row * rows


class FirstOf(FixedPrice):
    """In hindsight: so many tokens of each draft, from texts or not."""

    def __init__(self, most: int, searches: bool) -> None:
        self._most, self._searches = most, searches

    def whom_to_search(self, orders: Many[int]) -> set[int]:
        return {*orders} if self._searches else set()

    def lengths(self, rows: int, room: int, candidates: Many[Candidate]) -> list[int]:
        return [min(self._most, len(candidate.confidence)) for candidate in candidates]


class World:
    """Serves with one price; `layer` says whether one runs, where it is no trial's matter."""

    def __init__(self, costs: Costs, seed: int, layer: bool | LayerTrials, price: DraftPrice) -> None:
        self.costs, self.layer, self.dice = costs, layer, random.Random(seed)
        self.now, self.phase, self.steps = 0.0, Phase(0, 0, 0, 0, 0), 0
        self.drafting = Drafting([_Layer(self), _Texts(self)], price, LONGEST)
        self.sequences: list[Sequence] = []
        self.ages: list[int] = []
        self.lengths: dict[int, int] = {}
        self.wanted = WantedLengths()
        self.orders = 0
        self.awake = False  # before the step that comes

    def serve(self, phases: Many[Phase]) -> float:
        """Seconds."""
        for self.phase in phases:
            left = float(self.phase.tokens)
            while left > 0:
                left -= self.step()
        return self.now

    def step(self) -> int:
        self._meet()
        asked = self.drafting.due()
        if asked:
            self.drafting.propose(self.sequences, 4096, lambda: self.now)
        drafts = {each.order: [*each.draft] for each in self.sequences}
        drafted, count = sum(map(len, drafts.values())), len(self.sequences)
        awake = self.layer.awake if isinstance(self.layer, LayerTrials) else self.layer
        self.now += self.costs.plain(count + drafted)
        verified, made = [], 0
        for index, each in enumerate(self.sequences):
            draft = drafts[each.order]
            right = draft.index(WRONG) if WRONG in draft else len(draft)
            one = self.drafting.settle(each, len(draft), (RIGHT,) * (right + 1), self.now)
            verified += [] if one is None else [one]
            made += right + 1
            self.ages[index] += right + 1
            own = one.rows if one is not None and one.drafter == _Layer.name else None
            made_before = self.lengths.get(each.order, 0)
            wanted = self.wanted.note(each.order, own, made_before) if awake else 0
            self.lengths[each.order] = min(LONGEST, wanted)
            each.draft.clear()
        passes = self.costs.layer if awake else 0.0
        further = passes * (max(self.lengths.values()) - 1) if awake else 0.0
        seconds = self.costs.plain(count + drafted) + further
        self.now += passes + further
        self.awake = awake
        self.steps += 1
        if asked or awake:
            ran = RanStep(count + drafted, drafted, seconds, passes=passes, verified=verified)
            self.drafting.note_step(ran, lambda: self.now)
        else:
            self.drafting.rest_steps(seconds, 1)
        return made

    def _meet(self) -> None:
        """Requests come and go."""
        for index in reversed(range(len(self.sequences))):
            if self.ages[index] >= self.costs.life or index >= self.phase.sequences:
                self.drafting.forget(self.sequences.pop(index))
                del self.ages[index]
        while len(self.sequences) < self.phase.sequences:
            request = GenerationRequest(self.orders, (1, 2, 3), PARAMS)
            self.sequences.append(Sequence.start(request, self.orders, frozenset()))
            self.ages.append(self.dice.randrange(self.costs.life))
            self.orders += 1

    def guess(self, chance: float, most: int, said: float) -> Draft:
        return Draft([RIGHT if self.dice.random() < chance else WRONG for _ in range(most)], [said] * most)


class _Layer:
    name = "mtp"

    def __init__(self, world: World) -> None:
        self._world = world

    def guess(self, sequence: Sequence, most: int) -> Draft:
        made = self._world.lengths.get(sequence.order, 0)
        self._world.now += self._world.costs.ask / len(self._world.sequences)
        return self._world.guess(self._world.phase.layer, min(made, most), 0.6) if made else NO_DRAFT

    def forget(self, sequence: Sequence) -> None:
        self._world.lengths.pop(sequence.order, None)


class _Texts:
    name = "suffix"

    def __init__(self, world: World) -> None:
        self._world, self._read = world, set[int]()

    def guess(self, sequence: Sequence, most: int) -> Draft:
        world = self._world
        world.now += world.costs.search
        if sequence.order not in self._read:
            self._read.add(sequence.order)
            world.now += world.costs.read
        if world.dice.random() >= world.phase.found:
            return NO_DRAFT
        return world.guess(world.phase.text, most, 0.7)

    def forget(self, sequence: Sequence) -> None:
        self._read.discard(sequence.order)


def never(costs: Costs, phases: Many[Phase]) -> float:
    return sum(each.tokens / each.sequences * costs.plain(each.sequences) for each in phases)


def adaptive(costs: Costs, phases: Many[Phase], seed: int) -> float:
    trials = LayerTrials()
    return World(costs, seed, trials, AdaptivePrice(1, 1, trials)).serve(phases)


def best_fixed(costs: Costs, phases: Many[Phase], seed: int) -> float:
    """Of never drafting and of 1 or 3 tokens of each draft of a layer, of texts, and of both."""
    found = [never(costs, phases)]
    for most in (1, LONGEST):
        for searches, layer in ((True, False), (False, True), (True, True)):
            found.append(World(costs, seed, layer, FirstOf(most, searches)).serve(phases))
    return min(found)
