"""What keys found, with few names however many keys there are."""

from hypothesis import given
from hypothesis import strategies as st

from afserve.metrics import render
from afserve.server.metrics.key_meter import OTHERS, KeyMeter


def test_those_who_ask_the_most_are_shown():
    meter = KeyMeter(most=2)
    for key, asked, found in [("a", 100, 50), ("b", 12, 9), ("c", 5, 1), ("a", 100, 70), ("", 999, 999)]:
        meter.count_first(key, asked, found)
    assert meter.figures() == {"a": (200, 120), "b": (12, 9), OTHERS: (5, 1)}
    meter.count_first("c", 10, 30)  # 15, which is 1.25 times 12
    assert meter.figures() == {"a": (200, 120), "c": (10, 10), OTHERS: (5, 1)}
    text = render(meter.families())
    assert 'afserve_key_prompt_tokens_total{key="other keys"} 5' in text
    assert 'afserve_key_cached_tokens_total{key="c"} 10' in text and 'key="b"' not in text


def test_a_key_that_comes_back_goes_on_from_what_it_had():
    meter = KeyMeter(most=1)
    for key, asked in [("a", 40), ("b", 49), ("b", 1), ("a", 20)]:
        meter.count_first(key, asked, 0)
    assert meter.figures() == {"b": (1, 0), OTHERS: (69, 0)}
    meter.count_first("a", 3, 3)  # 63, which is 1.25 times 50 and more
    assert meter.figures() == {"a": (43, 3), OTHERS: (69, 0)}


def test_keys_that_ask_alike_do_not_take_turns():
    meter = KeyMeter(most=1)
    for _ in range(20):
        for key in ("a", "b"):
            meter.count_first(key, 10, 0)
    assert meter.figures() == {"a": (200, 0), OTHERS: (200, 0)}


def test_names_beyond_those_that_are_kept_count_for_the_others():
    meter = KeyMeter(most=1, kept=2)
    for key in ("a", "b", "c"):
        meter.count_first(key, 10, 0)
    meter.count_first("c", 1000, 0)
    assert meter.figures() == {"a": (10, 0), OTHERS: (1020, 0)}
    meter.count_first("b", 10, 0)
    assert meter.figures() == {"b": (10, 0), OTHERS: (1020, 0)}


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 50), st.integers(0, 60)), max_size=60))
def test_every_token_counts_once_and_no_count_goes_down(asked):
    meter, last = KeyMeter(most=3, kept=6), {}
    for key, prompt, found in asked:
        meter.count_first(key, prompt, found)
        now = meter.figures()
        assert len(now) <= 4
        for name, counts in now.items():
            assert all(one >= other for one, other in zip(counts, last.get(name, (0, 0)), strict=True))
        last |= now
    for at, total in ((0, sum(p for _, p, _ in asked)), (1, sum(min(p, f) for _, p, f in asked))):
        assert sum(counts[at] for counts in last.values()) == total
