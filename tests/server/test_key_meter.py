"""What keys found, with few names however many keys there are."""

from hypothesis import given
from hypothesis import strategies as st

from afserve.metrics import render
from afserve.server.metrics.key_meter import OTHERS, KeyMeter


def test_those_who_ask_the_most_have_counts_of_their_own():
    meter = KeyMeter(most=2)
    for key, asked, found in [("a", 100, 50), ("b", 10, 9), ("c", 5, 1), ("a", 100, 70), ("", 999, 999)]:
        meter.count_first(key, asked, found)
    assert meter.figures() == {"a": (200, 120), "b": (10, 9), OTHERS: (5, 1)}
    meter.count_first("c", 20, 30)
    assert meter.figures() == {"a": (200, 120), "c": (20, 20), OTHERS: (15, 10)}
    text = render(meter.families())
    assert 'afserve_key_prompt_tokens_total{key="other keys"} 15' in text
    assert 'afserve_key_cached_tokens_total{key="c"} 20' in text and 'key="b"' not in text


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 50), st.integers(0, 60)), max_size=60))
def test_nothing_is_lost_and_no_count_goes_down_while_it_is_there(asked):
    meter, before = KeyMeter(most=3), {}
    for key, prompt, found in asked:
        meter.count_first(key, prompt, found)
        now = meter.figures()
        assert len(now) <= 4
        for name in now.keys() & before.keys():
            assert all(one >= other for one, other in zip(now[name], before[name], strict=True))
        before = dict(now)
    for at, total in ((0, sum(p for _, p, _ in asked)), (1, sum(min(p, f) for _, p, f in asked))):
        assert sum(counts[at] for counts in meter.figures().values()) == total
