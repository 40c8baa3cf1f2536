"""The simulator of priced drafts: what it plays follows from the script, and the price is near the best there."""

import numpy as np
import pytest

from afserve.engine.draft.adaptive_price import AdaptivePrice
from bench.draft_off import TAKEN_OUT, package
from bench.draft_price import FirstTokens, Mix
from bench.draft_stages import LONGEST, Deployment, Routing, Stages
from bench.origin import ROOT

DEAR_WEIGHTS = Stages("weights", 4e-3, 2e-5, 1e-4, 4e-5, 16)
DEAR_ROWS = Stages("rows", 1e-3, 2e-4, 5e-5, 6e-5, 4)


@pytest.fixture(scope="module")
def routing() -> Routing:
    rng = np.random.default_rng(3)
    return Routing(rng.gamma(2.0, size=(2, 2, 16)), 4)


def test_experts_of_a_row_are_distinct_and_follow_the_counts():
    counts = np.ones((1, 1, 8))
    counts[..., 3] = 40.0
    routing = Routing(counts, 2)
    chosen, owner_R = routing.draw(np.zeros(50, np.int64), np.zeros(50, np.int64), np.random.default_rng(1))
    assert chosen.shape == (50, 1, 2) and (chosen[..., 0] != chosen[..., 1]).all()
    assert (chosen == 3).any(-1).mean() > 0.8 and list(owner_R) == list(range(50))


def test_rows_of_drafts_belong_to_their_sequences(routing):
    lengths = np.array([0, 3, 1])
    chosen, owner_R = routing.draw(np.zeros(3, np.int64), lengths, np.random.default_rng(1))
    assert len(chosen) == 7 and np.bincount(owner_R).tolist() == [1, 4, 2]


def test_a_text_that_is_always_right_gives_what_is_drafted(routing):
    stages = Stages("one second", 1.0, 0.0, 0.0, 0.0, 1)
    deployment = Deployment(stages, routing, [1.0 - 1e-12] * 6, False, 1)
    for length in (0, 3, LONGEST):
        played = deployment.play([FirstTokens(length)] * deployment.nodes, 5)
        assert played.drafted == 5 * 6 * length
        assert played.tokens_s == pytest.approx(6.0 * (1 + length))


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("stages", [DEAR_WEIGHTS, DEAR_ROWS], ids=lambda stages: stages.name)
@pytest.mark.parametrize("sequences", [1, 4, 32])
@pytest.mark.parametrize("acceptance", ["0.2", "0.9"])
def test_the_price_is_near_the_best_length_of_each_mix(stages, sequences, acceptance, routing):
    """Scripted seconds: no machine's load is in this."""
    deployment = Mix(stages, sequences, acceptance, False).deployment(routing)
    fixed = [
        deployment.play([FirstTokens(length)] * deployment.nodes, 120).tokens_s for length in (0, 1, 2, 4, 8)
    ]
    prices = [AdaptivePrice(routing.experts, routing.top_k) for _ in range(deployment.nodes)]
    assert deployment.play(prices, 120).tokens_s > 0.95 * max(fixed)


@pytest.mark.slow
def test_what_is_taken_out_to_see_what_no_drafts_cost_is_there(tmp_path):
    """Once each, and what is left is still a program."""
    package(tmp_path, without=True)
    for name in {name for name, _, _ in TAKEN_OUT}:
        text = (tmp_path / "afserve" / name).read_text()
        assert text != (ROOT / "afserve" / name).read_text()
        compile(text, name, "exec")
