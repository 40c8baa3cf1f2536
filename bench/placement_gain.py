"""What balancing is worth on the simulator, net of moving: 32 to 256 expert nodes, recorded skew, domains that switch.

Loads: each of LAYERS layers gives EXPERTS experts the shares of recorded ones, drawn with replacement and by the same
draw in every domain, so that what is hot together in the recording stays so. Times: an expert of DeepSeek-V3's size in
FP8 on a device of 3.35 TB/s and 1,979 TFLOP/s, of which 80 % and 60 % are reached; attention stages as long as
balanced expert stages, transfers a quarter of that. A move is 44 MB over 50 GB/s, a quarter of it lost to serving.
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from afserve.placement.optimizer.balance import balance
from afserve.placement.optimizer.problem import Floats, MovePrice, Nodes, Problem, TimeModel, scenarios
from afserve.placement.optimizer.split import node_load
from afserve.placement.placement import Placement
from afserve.placement.planner.simulate.layer_stages import LinkTimes
from afserve.placement.planner.simulate.layers import Script, Simulation

LAYERS, EXPERTS, TOP_K = 12, 256, 8
EXPERT_BYTES = 3 * 7168 * 2048.0
PER_EXPERT_S = EXPERT_BYTES / (0.8 * 3.35e12)
PER_ROW_S = 2 * EXPERT_BYTES / (0.6 * 1979e12)
PRICE = MovePrice(EXPERT_BYTES, 50e9)
TOKENS_PER_NODE = 256  # of each micro-batch over all ranks, for one expert node
MOVES_PER_LAYER = 8  # of one decision, as the rebalancer's rules have it
DOMAIN_S, REACTION_S = 60.0, 3.0  # how long a domain lasts; from its switch to the new placement in force
RANKS, MICRO_BATCHES = 4, 3


def gain(recorded: Mapping[str, Floats]) -> Iterator[dict[str, object]]:
    """Tokens per second of never balanced, balanced once on the first domain, and followed; medians over switches."""
    loads = resampled(recorded)
    for nodes in (32, 64, 128, 256):
        pool, tokens = Nodes.even(nodes, EXPERTS + nodes), TOKENS_PER_NODE * nodes
        plain = Placement.contiguous(layers=LAYERS, experts=EXPERTS, nodes=nodes)
        even = scenarios(np.ones((LAYERS, EXPERTS)))
        stage = float(
            Stages(balance(Problem(even, pool)).placement(), even[0], tokens, 0.0).full_expert_seconds
        )
        never, stayed, net, moved = [], [], [], []
        for old, new in itertools.permutations(loads, 2):
            load = loads[new]
            stood = balance(Problem(scenarios(loads[old]), pool)).placement()
            asked = Problem(scenarios(load), pool, current=stood, moves=MOVES_PER_LAYER * LAYERS)
            found = balance(asked)
            before = rate(stood, load, tokens, stage)
            after = rate(found.placement(), load, tokens, stage)
            lost = PRICE.move_seconds(found.certificate.busiest)
            never.append(rate(plain, load, tokens, stage))
            stayed.append(before)
            net.append((REACTION_S * before + (DOMAIN_S - REACTION_S - lost) * after) / DOMAIN_S)
            moved.append(found.certificate.moves)
        gains = [ours / base for ours, base in zip(net, never, strict=True)]
        over_stayed = [ours / base for ours, base in zip(net, stayed, strict=True)]
        yield {
            "bench": "gain", "nodes": nodes, "slots": EXPERTS + nodes, "switches": len(net),
            "never_tok_s": statistics.median(never), "once_tok_s": statistics.median(stayed),
            "followed_net_tok_s": statistics.median(net), "moves": statistics.median(moved),
            "gain_median": statistics.median(gains), "gain_min": min(gains), "gain_max": max(gains),
            "gain_over_once": statistics.median(over_stayed),
        }  # fmt: skip


def resampled(recorded: Mapping[str, Floats]) -> dict[str, Floats]:
    """load_LE of LAYERS x EXPERTS for each domain, from recordings of fewer."""
    rng = np.random.default_rng(0)
    layers, experts = next(iter(recorded.values())).shape
    layer_L1 = np.arange(LAYERS)[:, None] % layers
    expert_LE = rng.integers(0, experts, (LAYERS, EXPERTS))
    return {name: load_LE[layer_L1, expert_LE] for name, load_LE in recorded.items()}


def rate(placement: Placement, load_LE: Floats, tokens: float, stage: float) -> float:
    """Simulated tokens per second of all ranks together."""
    script = Script(RANKS, MICRO_BATCHES, LAYERS, steps=8, warm=2)
    run = Simulation(script, Stages(placement, load_LE, tokens, stage))  # type: ignore[arg-type]
    for _ in run.play():
        pass
    return MICRO_BATCHES * tokens / statistics.fmean(run.result.step_seconds)


class Stages:
    """What the simulation asks of its stage table. An expert stage lasts as long as its fullest node takes."""

    def __init__(self, placement: Placement, load_LE: Floats, tokens: float, stage: float) -> None:
        share_LE = load_LE / load_LE.sum(1, keepdims=True)
        parts = range(1, RANKS + 1)
        self._seconds = [_fullest(placement, share_LE * tokens * TOP_K * part / RANKS) for part in parts]
        self._stage = stage

    @property
    def full_expert_seconds(self) -> float:
        return float(self._seconds[-1].mean())

    def new_step(self, ranks: NDArray[np.int64], batch: int, random: np.random.Generator) -> None:
        """Lengths are alike."""

    def attention(self, ranks: NDArray[np.int64], batch: int) -> Floats:
        return np.full(len(ranks), self._stage)

    @property
    def outside(self) -> float:
        return self._stage

    @property
    def dispatch(self) -> LinkTimes:
        return LinkTimes(self._stage / 4, 0.0, 0.0)

    @property
    def combine(self) -> LinkTimes:
        return self.dispatch

    def experts(self, messages: int, random: np.random.Generator) -> float:
        return float(random.choice(self._seconds[messages - 1]))


def _fullest(placement: Placement, rows_LE: Floats) -> Floats:
    """Seconds of the slowest node per layer, from its rows and the distinct experts that they activate."""
    time = TimeModel(PER_ROW_S, PER_EXPERT_S, float(rows_LE[0].sum()))
    slot_LNS, share_LNS = placement.slot_array(), placement.share_array()
    rows_LNS = np.where(slot_LNS >= 0, share_LNS, 0.0)
    rows_LNS *= np.take_along_axis(rows_LE[:, None, :], slot_LNS.clip(0).reshape(LAYERS, 1, -1), 2).reshape(
        slot_LNS.shape
    )
    assert np.allclose(rows_LNS.sum(2), node_load(slot_LNS, share_LNS, rows_LE))
    seconds: Floats = time.cost(rows_LNS).sum(2).max(1)
    return seconds
