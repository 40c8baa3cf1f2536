"""What the price of drafts decides and learns: drawn cases for what must always hold, scripted ones for the rest."""

import random

import pytest

from afserve.engine.draft.acceptance import Acceptance
from afserve.engine.draft.adaptive_price import AdaptivePrice
from afserve.engine.draft.allotment import NOBODY, Others, RowPrices, allot
from afserve.engine.draft.price import Candidate, RanStep
from afserve.engine.draft.search_turns import SearchTurns
from afserve.engine.draft.step_costs import ExpertSpread, StepCosts
from tests.by_day import seeds


def drawn_case(rng: random.Random):
    """Survivals that never rise, rows, others' rows, room and prices."""
    drafts = []
    for _ in range(rng.choice((1, 2, 7, 40))):
        chance, draft = 1.0, []
        for _ in range(rng.randrange(0, 9)):
            chance *= rng.choice((0.0, 0.3, 0.9, 1.0, rng.random()))
            draft.append(chance)
        drafts.append(draft)
    rows = len(drafts) + rng.randrange(3)
    prices = RowPrices(
        1e-3 * rng.uniform(1, 20),
        1e-4 * rng.random(),
        1e-4 * rng.random(),
        1e-4 * rng.random(),
        64 * rng.random(),
        rng.uniform(0.8, 1.0),
    )
    return (
        drafts,
        rows,
        rng.choice((NOBODY, Others(5.0, 9.0), Others(300.0, 400.0))),
        rows + rng.randrange(-2, 60),
        prices,
    )


@pytest.mark.parametrize("seed", seeds(200))
def test_an_allotment_stays_within_what_was_guessed_and_what_the_step_has_room_for(seed):
    drafts, rows, others, room, prices = drawn_case(random.Random(seed))
    lengths = allot(drafts, rows, others, room, prices)
    assert len(lengths) == len(drafts)
    assert all(0 <= length <= len(draft) for length, draft in zip(lengths, drafts, strict=True))
    assert sum(lengths) <= max(0, room - rows)
    assert lengths == allot(drafts, rows, others, room, prices)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("dearer", [("own",), ("shared",), ("own", "shared", "expert")])
@pytest.mark.parametrize("seed", seeds(100))
def test_dearer_rows_never_mean_longer_drafts(seed, dearer):
    drafts, rows, others, room, prices = drawn_case(random.Random(seed))
    before = allot(drafts, rows, others, room, prices)
    for times in (1.5, 4.0, 50.0):
        after = allot(
            drafts,
            rows,
            others,
            room,
            prices._replace(**{name: times * getattr(prices, name) for name in dearer}),
        )
        assert all(new <= old for new, old in zip(after, before, strict=True))
        before = after


@pytest.mark.parametrize("seed", seeds(60))
def test_no_other_number_of_tokens_is_expected_to_be_faster(seed):
    drafts, rows, _, room, prices = drawn_case(random.Random(seed))
    lengths = allot(drafts, rows, NOBODY, room, prices)

    def speed(tokens):
        kept = sorted((chance for draft in drafts for chance in draft), reverse=True)[:tokens]
        return (rows + sum(kept)) / (prices.seconds + prices.added(len(kept)))

    most = min(sum(map(len, drafts)), max(0, room - rows))
    assert speed(sum(lengths)) >= max(speed(tokens) for tokens in range(most + 1)) * (1 - 1e-9)


def test_of_a_draft_the_first_tokens_are_taken_and_of_several_the_likely_ones():
    prices = RowPrices(1.0, 0.1, 0.0, 0.0, 0.0, 1.0)
    assert allot([[0.9, 0.8, 0.01], [0.05], [], [1.0]], 4, NOBODY, 100, prices) == [2, 0, 0, 1]
    assert allot([[0.9, 0.8, 0.01], [0.05], [], [1.0]], 4, NOBODY, 6, prices) == [1, 0, 0, 1]


def test_others_rows_make_what_is_read_anyway_cheap_and_what_they_wait_for_dear():
    read = RowPrices(1.0, 0.0, 0.0, 0.05, 56.0, 0.875)
    assert allot([[0.5]], 1, NOBODY, 9, read) == [1]
    many = read._replace(untouched=0.01)
    assert allot([[0.05]], 1, NOBODY, 9, read) == [0] and allot([[0.05]], 1, Others(60.0, 60.0), 9, many) == [
        1
    ]
    computed = RowPrices(1.0, 0.0, 0.1, 0.0, 0.0, 1.0)
    assert allot([[0.5]], 1, NOBODY, 9, computed) == [1] and allot(
        [[0.5]], 1, Others(60.0, 60.0), 9, computed
    ) == [0]


@pytest.mark.parametrize("bad", [float("nan"), -0.1, 1.1, float("inf")])
def test_what_is_no_probability_is_refused(bad):
    with pytest.raises(ValueError, match="not a probability"):
        Acceptance().survival(Candidate(0, "ngram", [0.5, bad]))


@pytest.mark.parametrize("said", [0.0, 0.3, 0.5, 0.85, 1.0])
@pytest.mark.parametrize("true", [0.1, 0.5, 0.9])
def test_what_a_drafter_says_is_corrected_by_what_came(said, true):
    known, rng = Acceptance(), random.Random(7)
    for step in range(1500):
        right = 0
        while right < 3 and rng.random() < true:
            right += 1
        known.learn_outcome(Candidate(step, "ngram", [said] * 3), min(right + 1, 3), right)
        known.drop_trend(step)
    first, second, third = known.survival(Candidate(-1, "ngram", [said] * 3)) + [0.0] * (
        2 if true < 0.2 else 0
    )
    assert first == pytest.approx(true, abs=0.08)
    if true > 0.2:
        assert second == pytest.approx(true**2, abs=0.12) and third == pytest.approx(true**3, abs=0.15)


def test_a_sequence_is_told_from_others():
    known, rng = Acceptance(), random.Random(3)
    for _ in range(300):
        for order, true in ((0, 0.9), (1, 0.2)):
            right = int(rng.random() < true)
            known.learn_outcome(Candidate(order, "ngram", [0.5]), 1, right)
    (good,), (poor,) = (known.survival(Candidate(order, "ngram", [0.5])) for order in (0, 1))
    (new,) = known.survival(Candidate(2, "ngram", [0.5]))
    assert poor < 0.4 < new < 0.7 < good


def scripted(spread: ExpertSpread, rows: int, drafted: int, pool: float) -> float:
    """Seconds."""
    touched = spread.touched(rows + pool - drafted * spread.overlap)
    return 2e-3 + 3e-5 * rows + 2e-5 * (rows + pool) + 6e-5 * touched


def test_costs_follow_from_steps_as_they_were_measured():
    costs, truth, rng = StepCosts(ExpertSpread(64, 8)), ExpertSpread(64, 8), random.Random(1)
    for _ in range(600):
        rows, pool = rng.choice((1, 4, 8, 16, 32)), rng.choice((0.0, 8.0, 40.0))
        drafted = rng.randrange(rows)
        seconds = scripted(truth, rows, drafted, pool) * (1 + 0.05 * rng.random())
        costs.note_step(RanStep(rows, drafted, seconds * rng.choice((1, 1, 1, 1, 1, 1, 1, 1, 1, 9)), pool))
    for rows in (1, 8, 24):
        prices = costs.prices(rows)
        pool = costs.pool
        assert prices.seconds == pytest.approx(scripted(truth, rows, 0, pool), rel=0.15)
        for more in (1, 4, 16):
            wanted = scripted(truth, rows + more, more, pool) - scripted(truth, rows, 0, pool)
            assert prices.added(more) == pytest.approx(wanted, rel=0.4)


def test_what_experts_rows_share_is_measured():
    spread = ExpertSpread(64, 8)
    truth = ExpertSpread(64, 8)
    truth.experts, truth.overlap = 40.0, 0.6
    for _ in range(100):
        spread.learn_spread(RanStep(6, 0, 1.0, touched=round(truth.touched(6))))
    assert spread.experts == pytest.approx(40.0, rel=0.1)
    for _ in range(100):
        spread.learn_spread(RanStep(6, 4, 1.0, touched=round(truth.touched(2 + 4 * 0.4))))
    assert spread.overlap == pytest.approx(0.6, abs=0.12)


def taught(rng: random.Random, per_row: float) -> AdaptivePrice:
    price = AdaptivePrice(64, 8)
    for _ in range(200):
        rows = rng.randrange(1, 40)
        price.step_measured(RanStep(rows, 0, 1e-3 + per_row * rows))
    return price


@pytest.mark.slow
def test_where_nothing_pays_little_time_goes_into_trying():
    rng = random.Random(0)
    price = taught(rng, 1e-3)  # rows are as dear as a step
    plain = drafted = 0.0
    verified = 0
    for _ in range(4000):
        lengths = price.lengths(1, 512, [Candidate(0, "ngram", [0.5, 0.5, 0.5])])
        plain += 2e-3
        drafted += 1e-3 + 1e-3 * (1 + sum(lengths))
        verified += any(lengths)
        price.step_measured(RanStep(1 + sum(lengths), sum(lengths), 1e-3 + 1e-3 * (1 + sum(lengths))))
        price.confirmed(Candidate(0, "ngram", [0.5, 0.5, 0.5]), 1, 0)
    assert 10 < verified < 80
    assert drafted < 1.02 * plain


@pytest.mark.slow
def test_all_sequences_that_rest_are_tried_in_turn():
    price = taught(random.Random(0), 1e-3)
    found = set()
    for _ in range(3000):
        lengths = price.lengths(3, 512, [Candidate(order, "ngram", [0.1]) for order in range(3)])
        found |= {order for order, length in enumerate(lengths) if length}
        for order in range(3):
            price.confirmed(Candidate(order, "ngram", [0.1]), 1, 0)
    assert found == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(30))
def test_a_price_stays_within_bounds_whatever_it_is_told(seed):
    """And says the same when it is told the same."""

    def play() -> list[list[int]]:
        rng, price, said = random.Random(seed), AdaptivePrice(rng_experts, 2), []
        for step in range(120):
            count = rng.choice((1, 1, 5, 64))
            candidates = [
                Candidate(rng.randrange(80), "ngram", [rng.choice((0.0, 0.5, 1.0))] * rng.randrange(1, 17))
                for _ in range(count)
            ]
            rows = count + rng.randrange(4)
            room = rows + rng.choice((0, 1, 30, 2000))
            lengths = price.lengths(rows, room, candidates)
            assert sum(lengths) <= room - rows
            for candidate, length in zip(candidates, lengths, strict=True):
                assert 0 <= length <= len(candidate.confidence)
                right = rng.randrange(length + 1)
                price.confirmed(candidate, min(right + 1, len(candidate.confidence)), right)
            said.append(lengths)
            drafted = sum(lengths)
            seconds = rng.choice((0.0, 1e-9, 1e-3, 5.0, float("inf"), float("nan")))
            touched = rng.choice((None, 0, 3, 10_000))
            price.step_measured(RanStep(rows + drafted, drafted, seconds, rng.choice((0.0, 500.0)), touched))
            price.sequence_ended(step)
        return said

    rng_experts = random.Random(seed).choice((1, 2, 8, 512))
    assert play() == play()


def test_512_sequences_and_one():
    price = taught(random.Random(2), 1e-6)
    many = [Candidate(order, "ngram", [1.0] * 16) for order in range(512)]
    lengths = price.lengths(512, 4096, many)
    assert sum(lengths) == 4096 - 512
    assert price.lengths(1, 4096, many[:1]) == [16]
    assert price.lengths(1, 1, many[:1]) == [0]
    dear = taught(random.Random(2), 1e-3)
    assert dear.lengths(1, 4096, [Candidate(0, "ngram", [0.0] * 16)]) == [0]


def searched(steps, seconds, won=0.0):
    """How often each of 8 is searched in steps of a millisecond; the third pays."""
    turns, found = SearchTurns(), dict.fromkeys(range(8), 0)
    for _ in range(steps):
        for order in turns.choose(range(8)):
            found[order] += 1
            turns.took(order, seconds)
            if order == 3 and won:
                turns.paid(3)
        turns.pass_time(1e-3, 1e-3, won)
    return found, turns


def test_whoever_is_searched_in_vain_is_searched_seldom_and_in_turn():
    found, turns = searched(8000, 5e-5)
    assert 0.8 * 8000 * 5e-6 < sum(found.values()) * 5e-5 < 8000 * 5e-6 + 5e-3
    assert max(found.values()) - min(found.values()) <= 2
    turns.drop_order(3)
    assert not {3} & {*turns._hope, *turns._last}


def test_whom_it_pays_of_is_searched_in_each_step():
    found, _ = searched(1000, 5e-5, won=1e-4)
    assert found[3] > 990


def test_what_was_taken_to_pay_and_does_not_is_left():
    found, _ = searched(8000, 5e-5, won=-1e-4)
    assert found[3] < 500


def test_searches_that_take_nothing_to_speak_of_are_made_in_each_step():
    turns = SearchTurns()
    for step in range(200):
        assert turns.choose(range(4)) == ({0, 1, 2, 3} if step > 1 else {0}) or step == 1
        for order in range(4):
            turns.took(order, 1e-6)
        turns.pass_time(1e-2, 1e-2, 0.0)
