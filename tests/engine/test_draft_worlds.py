"""What is drafted without a number costs next to nothing where drafts do not pay, and finds out where they do."""

import random

import pytest

from afserve.drafts import DraftChoice
from afserve.engine.draft.layer_drafter import LayerDrafter, WantedLengths
from afserve.engine.draft.layer_trials import LayerTrials
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.step_plan import Chunk, ChunkKind, StepPlan
from tests.engine.draft_worlds import Costs, Phase, adaptive, best_fixed, never

STEPS = 4000
MS = 1e-3
ASK = 3e-5  # seconds


def drawn(seed: int) -> tuple[Costs, list[Phase]]:
    """Extremes of what rows, searches and passes cost, and of how often guesses are right."""
    rng = random.Random(seed)
    step, sequences, count = rng.choice((0.3 * MS, 20 * MS)), rng.choice((1, 4, 16)), rng.choice((1, 1, 2))
    costs = Costs(
        step,
        row=step * rng.choice((0.05, 0.3, 1.0)),
        search=rng.choice((2e-6, 5e-5)),
        read=0.1 * MS,
        layer=step * rng.choice((0.05, 0.3, 0.8)),
        life=rng.choice((192, 800)),
        ask=ASK,
    )
    phases = [
        Phase(
            STEPS * sequences,
            sequences,
            text=rng.choice((0.0, 0.3, 0.9)),
            found=rng.choice((0.05, 0.9)),
            layer=rng.choice((0.05, 0.5, 0.9)),
        )
        for _ in range(count)
    ]
    return costs, phases


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 8, 32])
@pytest.mark.parametrize("row", [0.05, 1.0])
def test_texts_that_repeat_nothing_lose_less_than_2_of_100(sequences, row):
    """With steps of a third of a millisecond, which a search and the reading of a text are long beside."""
    costs = Costs(0.3 * MS, 0.3 * MS * row, 3e-6, 0.2 * MS, 0.1 * MS, 192, ASK)
    phases = [Phase(3000 * sequences, sequences, 0.1, 0.05, 0.1)]
    assert adaptive(costs, phases, 1) < 1.02 * never(costs, phases)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0.3 * MS, pytest.param(20 * MS, marks=pytest.mark.long)])
def test_what_begins_to_pay_is_found_and_what_ends_to_is_left(step):
    costs = Costs(step, 0.05 * step, 3e-6, 0.1 * MS, 0.1 * step, 192, ASK)
    bad, good = Phase(3000, 4, 0.1, 0.05, 0.05), Phase(48000, 4, 0.9, 0.9, 0.9)
    phases = [bad, good, bad]
    assert adaptive(costs, phases, 1) < 0.65 * never(costs, phases)
    assert best_fixed(costs, phases, 1) > 0.92 * adaptive(costs, phases, 1)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_no_world_loses_much_to_never_drafting_nor_to_what_was_best_in_hindsight(seed):
    costs, phases = drawn(seed)
    took = adaptive(costs, phases, seed)
    assert took < 1.02 * never(costs, phases)
    assert best_fixed(costs, phases, seed) > 0.95 * took


def awake_of(won: float, steps: int) -> list[bool]:
    """A step takes a second without the layer, and a pass of it 0.3."""
    trials, kept = LayerTrials(), []
    for _ in range(steps):
        kept.append(trials.awake)
        trials.note_steps(4, 1.0, 1.0, 0.3 if trials.awake else 0.0, won if trials.awake else 0.0)
    return kept


@pytest.mark.parametrize(("won", "least", "most"), [(0.6, 1.0, 1.0), (0.31, 1.0, 1.0), (0.0, 0.0, 0.02)])
def test_a_layer_runs_where_it_wins_more_than_its_passes_take(won, least, most):
    kept = awake_of(won, 10_000)
    assert least <= sum(kept) / len(kept) <= most
    assert any(kept[5_000:]), "and is tried again"


@pytest.mark.slow
def test_what_wins_is_not_ended_by_bad_luck():
    """A layer that wins four steps of five is rested seldom by chance, and soon where it wins no more."""
    dice, trials, kept = random.Random(5), LayerTrials(), 0
    for _ in range(20_000):
        kept += trials.awake
        won = (1.0 if dice.random() < 0.8 else -1.4) if trials.awake else 0.0
        trials.note_steps(1, 1.0, 1.0, 0.1 if trials.awake else 0.0, won)
    assert kept > 19_000
    lost = 0.0
    for _ in range(2000):
        lost += 1.5 if trials.awake else 0.0
        trials.note_steps(1, 1.0, 1.0, 0.1 if trials.awake else 0.0, -1.4 if trials.awake else 0.0)
    assert lost < 150.0


def test_a_layer_guesses_one_token_more_than_was_verified_of_its_own():
    """And fewer where others' were."""
    drafter = LayerDrafter(DraftChoice.parse("mtp"), 100)
    sequence = Sequence.start(GenerationRequest(0, (1, 2, 3), SamplingParams(max_tokens=50)), 0, frozenset())
    plan = StepPlan(0, (Chunk(sequence, 2, 3, True, ChunkKind.VERIFY, supposed=2),))
    for chosen, most in ((False, 1), (True, 3), (False, 2), (False, 1), (True, 3), (True, 3)):
        if chosen:
            drafter.choose(0)
        assert [most for _, _, most in drafter.begin_runs(plan, {0: (4, 5)})] == [most]
    drafter.forget(sequence)
    assert [most for _, _, most in drafter.begin_runs(plan, {0: (4, 5)})] == [1]


def test_what_was_guessed_in_vain_twice_is_not_guessed_for_a_while():
    lengths, made, found = WantedLengths(), 3, []
    for _ in range(26):
        made = lengths.note(0, min(2, made), made)
        found.append(made)
    assert found[:2] == [3, 2] and found[2:12] == [2] * 10 and found[12:14] == [3, 3]
    assert [lengths.note(1, made, made) for made in (1, 2, 3)] == [2, 3, 4]


def test_each_load_has_its_own_answer():
    trials, kept = LayerTrials(), {1: 0, 32: 0}
    for step in range(8000):
        sequences = 1 if step // 500 % 2 else 32
        kept[sequences] += trials.awake
        won = 0.6 if sequences == 1 else 0.0
        trials.note_steps(sequences, 1.0, 1.0, 0.3 * trials.awake, won * trials.awake)
    assert kept[1] > 3900 and kept[32] < 200


def test_passes_over_prompts_are_paid_for_step_by_step():
    trials = LayerTrials()
    for _ in range(20):
        trials.note_steps(1, 1.0, 1.0, 0.3, 0.6)
    trials.note_prompts(15.0, 0.0)
    for _ in range(200):
        trials.note_steps(1, 1.0, 1.0, 0.3, 0.6)
        assert trials.awake
