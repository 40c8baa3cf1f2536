"""Seeded faults every few seconds, with cancelled requests: all are answered exactly once, and nothing grows.

`python -m bench.faults --soak 30` is the long one.
"""

import random

import pytest

from bench.faults_load import Answer
from bench.faults_soak import Asked, Soak, arrivals, counted, measure, schedule

CSV = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.6805900,879,55
"""


@pytest.mark.alone
@pytest.mark.process
def test_every_request_is_answered_once_and_nothing_grows():
    row = measure(Soak(seconds=7.0, rate=6.0, every=1.2, warm=2.0, draft="suffix:8"))
    assert row["failed"] == row["altered"] == row["twice"] == row["short"] == 0, row
    assert row["accepted_drafts"] > 0, row
    assert row["compared"] > 20 and row["cancelled"] > 0 and sum(row["faults"].values()) >= 3, row
    for name in ("kv_in_use", "requests_open"):
        assert row[name][1] == 0, row
    before, after = row["processes"]
    assert before == after, row
    assert row["shared_segments"][0] == row["shared_segments"][1], row
    assert row["descriptors"][1] <= row["descriptors"][0] + 2 * after, row


def test_arrivals_of_a_trace_are_scaled_and_repeated(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(CSV)
    assert [tokens for _, tokens in arrivals(path)] == [44, 109, 55]
    drawn = schedule(Soak(60.0, path, rate=6.0), random.Random(1))
    found = [next(drawn) for _ in range(3000)]
    moments = [at for at, _ in found]
    assert moments[0] == 0.0 and moments == sorted(moments)
    assert moments[-1] == pytest.approx(len(found) / 6.0, rel=0.01)
    lines = tmp_path / "trace.jsonl"
    lines.write_text('{"timestamp": 500, "output_length": 7}\n{"timestamp": 1500, "output_length": 9}\n')
    assert arrivals(lines) == [(0.0, 7), (1.0, 9)]


def test_what_counts_as_answered_once():
    def asked(text, *, error="", ends=1, times=(1.0,), cut=0, greedy=True):
        return Asked(Answer("p", 0.0, list(times), text, error, ends), 4, greedy, cut)

    row = counted(
        [
            asked("abc"),
            asked("ab\ufffd"),
            asked("xyz", greedy=False),
            asked("axc"),
            asked("a", ends=2),
            asked("a", error="", cut=1, ends=0),
            asked("", error="gone"),
        ],
        {"p": "abcd"},
    )
    assert (row["requests"], row["answered"], row["cancelled"], row["failed"]) == (7, 5, 1, 1)
    assert (row["twice"], row["compared"], row["altered"]) == (1, 5, 1)
