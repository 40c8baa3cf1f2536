"""What keys found, with few names however many keys there are."""

from hypothesis import given
from hypothesis import strategies as st

from afserve.engine.scheduling.found_below import FoundBelow
from afserve.engine.scheduling.request import TokenEvent
from afserve.metrics import render
from afserve.server.metrics.key_meter import OTHERS, KeyCounts, KeyMeter


def first(found, *below):
    return TokenEvent(1, (), cached_tokens=found, found_below=FoundBelow(*below))


def shares(meter):
    return {key: (counts.asked, counts.found) for key, counts in meter.figures().items()}


def test_those_who_ask_the_most_are_shown():
    meter = KeyMeter(most=2)
    for key, asked, found in [("a", 100, 50), ("b", 12, 9), ("c", 5, 1), ("a", 100, 70), ("", 999, 999)]:
        meter.count_first(key, asked, first(found))
    assert shares(meter) == {"a": (200, 120), "b": (12, 9), OTHERS: (5, 1)}
    meter.count_first("c", 10, first(30))  # 15, which is 1.25 times 12
    assert shares(meter) == {"a": (200, 120), "c": (10, 10), OTHERS: (5, 1)}
    text = render(meter.families())
    assert 'afserve_key_prompt_tokens_total{key="other keys"} 5' in text
    assert 'afserve_key_cached_tokens_total{key="c",tier="memory"} 10' in text and 'key="b"' not in text


def test_tokens_count_where_they_were_found():
    """What an event says beyond the prompt's length does not count."""
    meter = KeyMeter(most=1)
    meter.count_first("a", 100, first(90, 10, 20, 30))
    meter.count_first("a", 10, first(90, 7, 8, 9))
    meter.count_first("b", 50, first(40, 0, 0, 40))
    assert meter.figures()["a"] == KeyCounts(110, 100, peer=17, host=23, disk=30)
    assert meter.figures()["a"].tiers() == {"memory": 30, "peer": 17, "host": 23, "disk": 30}
    text = render(meter.families())
    assert 'afserve_key_cached_tokens_total{key="a",tier="host"} 23' in text
    assert 'afserve_key_cached_tokens_total{key="other keys",tier="disk"} 40' in text


def test_a_key_that_comes_back_goes_on_from_what_it_had():
    meter = KeyMeter(most=1)
    for key, asked in [("a", 40), ("b", 49), ("b", 1), ("a", 20)]:
        meter.count_first(key, asked, first(0))
    assert shares(meter) == {"b": (1, 0), OTHERS: (69, 0)}
    meter.count_first("a", 3, first(3))  # 63, which is 1.25 times 50 and more
    assert shares(meter) == {"a": (43, 3), OTHERS: (69, 0)}


def test_keys_that_ask_alike_do_not_take_turns():
    meter = KeyMeter(most=1)
    for _ in range(20):
        for key in ("a", "b"):
            meter.count_first(key, 10, first(0))
    assert shares(meter) == {"a": (200, 0), OTHERS: (200, 0)}


def test_names_beyond_those_that_are_kept_count_for_the_others():
    meter = KeyMeter(most=1, kept=2)
    for key in ("a", "b", "c"):
        meter.count_first(key, 10, first(0))
    meter.count_first("c", 1000, first(0))
    assert shares(meter) == {"a": (10, 0), OTHERS: (1020, 0)}
    meter.count_first("b", 10, first(0))
    assert shares(meter) == {"b": (10, 0), OTHERS: (1020, 0)}


below = st.tuples(*3 * (st.integers(0, 30),))


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 50), st.integers(0, 60), below), max_size=60
    )
)
def test_every_token_counts_once_and_no_count_goes_down(asked):
    meter, last = KeyMeter(most=3, kept=6), {}
    for key, prompt, found, tiers in asked:
        meter.count_first(key, prompt, first(found, *tiers))
        now = meter.figures()
        assert len(now) <= 4
        for name, counts in now.items():
            assert all(one >= other for one, other in zip(counts, last.get(name, KeyCounts()), strict=True))
            assert min(counts.tiers().values()) >= 0 and sum(counts.tiers().values()) == counts.found
        last |= now
    for at, total in ((0, sum(p for _, p, *_ in asked)), (1, sum(min(p, f) for _, p, f, _ in asked))):
        assert sum(counts[at] for counts in last.values()) == total
