"""Scripted attention and expert nodes for `bench.draft_price`: what steps with drafts take, and what comes of them.

Four attention nodes at most share one pool of experts. A node's step takes its own attention side, then the experts'
calls, which have the rows of all nodes: for each expert the longer of reading its weights and of computing its tiles.
Nodes keep their own pace, so a node's speed is its tokens over its own seconds. Which experts a row chooses is drawn by
recorded frequencies of OLMoE-1B-7B; a draft's row keeps 38 % of the choice before it. Nothing is measured of this
machine. Shapes: R rows, L layers, K top-k, S sequences, P positions, N attention nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from afserve.engine.draft.price import Candidate, DraftPrice, RanStep

NODES = 4
LONGEST = 8  # tokens of a draft
KEPT = 0.38  # of a row's choice by the row behind it (Cohere, 4 tokens: FIELD)
WARM_UP = 40  # rounds that are played and not counted, for every policy
DRAWN = 4096  # choices of each domain
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds, over all layers: of a step at an attention node, of each of its rows, of reading an expert's weights, of
    computing a tile of `tile` rows."""

    name: str
    step: float
    row: float
    read: float
    tile_seconds: float
    tile: int


class Routing:
    """Choices drawn by how often each expert was chosen, by domain and layer."""

    def __init__(self, counts: Floats, top_k: int) -> None:
        """`counts`: domains, L, experts."""
        rng = np.random.default_rng(5)
        self.experts, self.top_k = counts.shape[2], top_k
        share = np.log(counts / counts.sum(2, keepdims=True))
        noisy = share[:, None] + rng.gumbel(size=(len(counts), DRAWN, *counts.shape[1:]))
        order = np.argsort(-noisy, axis=3)[..., :top_k]
        self.chosen = order + np.arange(counts.shape[1])[:, None] * self.experts  # domain, row, L, K

    @property
    def layers(self) -> int:
        return int(self.chosen.shape[2])

    def draw(self, domain_S: Ints, lengths_S: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Choices [R, L, K] of a step and the sequences [R] that they are of: each one's row, then first rows of
        drafts, second rows and so on."""
        rows, live = self._own(domain_S, rng), np.arange(len(domain_S))
        found, owners = [rows], [live]
        for position in range(int(lengths_S.max(initial=0))):
            still = lengths_S[live] > position
            live, before = live[still], rows[still]
            keeps = rng.random(before.shape) < KEPT
            rows = np.where(keeps, before, self._own(domain_S[live], rng))
            found.append(rows)
            owners.append(live)
        return np.concatenate(found), np.concatenate(owners)

    def _own(self, domain_N: Ints, rng: np.random.Generator) -> Ints:
        drawn: Ints = self.chosen[domain_N, rng.integers(DRAWN, size=len(domain_N))]
        return drawn


class Played(NamedTuple):
    """Of all rounds that count: tokens per second of all nodes, and verified tokens of drafts."""

    tokens_s: float
    drafted: int


class Deployment:
    """`sequences` in all, spread over up to `NODES` attention nodes. Sequence s is right with `acceptance_S[s]` in the
    mean, each token with a chance of its own; a drafter that is `informed` says these chances, too sure of itself, and
    another one says the same of all."""

    def __init__(
        self, stages: Stages, routing: Routing, acceptance_S: Sequence[float], informed: bool, seed: int
    ) -> None:
        self.stages, self.routing, self.informed = stages, routing, informed
        self.acceptance_S = np.asarray(acceptance_S)
        self.count, self.seed = len(acceptance_S), seed
        self.nodes = min(NODES, self.count)
        self.node_S = np.arange(self.count) % self.nodes
        self.domain_S = np.arange(self.count) // self.nodes % len(routing.chosen)

    def play(self, prices: Sequence[DraftPrice], rounds: int, tells_pool: bool = True) -> Played:
        """With one price for each node. Texts are the same whoever plays."""
        texts, routes = np.random.default_rng(self.seed), np.random.default_rng(self.seed + 1)
        tokens_N, seconds_N, drafted = np.zeros(self.nodes), np.zeros(self.nodes), 0
        for number in range(WARM_UP + rounds):
            chance_SP, right_S = self._texts(texts)
            said_SP = np.sqrt(chance_SP) if self.informed else np.full_like(chance_SP, 0.7)
            lengths_S = np.zeros(self.count, np.int64)
            asked: list[tuple[Ints, list[Candidate]]] = []
            for node, price in enumerate(prices):
                mine = np.flatnonzero(self.node_S == node)
                candidates = [Candidate(int(s), "scripted", said_SP[s].tolist()) for s in mine]
                lengths_S[mine] = price.lengths(len(mine), 4096, candidates)
                asked.append((mine, candidates))
            took_N, chosen, owner_R = self._step(lengths_S, routes)
            run_S = np.minimum(right_S, lengths_S)
            for node, (price, (mine, candidates)) in enumerate(zip(prices, asked, strict=True)):
                for s, candidate in zip(mine, candidates, strict=True):
                    tried = min(int(run_S[s]) + 1, LONGEST)
                    price.confirmed(candidate, tried, min(int(right_S[s]), tried))
                extra = int(lengths_S[mine].sum())
                pool = float(self.count + lengths_S.sum() - len(mine) - extra) if tells_pool else 0.0
                noisy = float(took_N[node]) * (1.0 + 0.03 * abs(routes.standard_normal()))
                layer = number // 16 % self.routing.layers
                own = chosen[self.node_S[owner_R] == node, layer]
                seen = len(np.unique(own)) if number % 16 == 0 else None
                price.step_measured(RanStep(len(mine) + extra, extra, noisy, pool, seen))
            if number >= WARM_UP:
                tokens_N += np.bincount(self.node_S, weights=1 + run_S, minlength=self.nodes)
                seconds_N += took_N
                drafted += int(lengths_S.sum())
        return Played(float((tokens_N / np.maximum(seconds_N, 1e-12)).sum()), drafted)

    def _texts(self, rng: np.random.Generator) -> tuple[Floats, Ints]:
        """How likely each guessed token is right, and how many are before one that is not."""
        mean_SP = np.broadcast_to(self.acceptance_S[:, None], (self.count, LONGEST))
        chance_SP = rng.beta(4.0 * mean_SP, 4.0 * (1.0 - mean_SP))
        wrong_SP = rng.random((self.count, LONGEST)) >= chance_SP
        right_S = np.where(wrong_SP.any(1), wrong_SP.argmax(1), LONGEST)
        return chance_SP, right_S

    def _step(self, lengths_S: Ints, rng: np.random.Generator) -> tuple[Floats, Ints, Ints]:
        """Its seconds by node, and the choices of all rows with the sequences that they are of."""
        stages, routing = self.stages, self.routing
        chosen, owner_R = routing.draw(self.domain_S, lengths_S, rng)
        rows_N = np.bincount(self.node_S, weights=1 + lengths_S, minlength=self.nodes)
        rows_E = np.bincount(chosen.ravel(), minlength=routing.layers * routing.experts)
        computing_E = -(-rows_E // stages.tile) * stages.tile_seconds
        experts = np.where(rows_E > 0, np.maximum(stages.read, computing_E), 0.0).sum() / routing.layers
        took_N: Floats = stages.step + stages.row * rows_N + experts
        return took_N, chosen, owner_R
