"""Counts, windows, skew, recordings and plain counts files."""

import json
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.errors import ConfigError
from afserve.placement.rebalance.record import MAGIC, decode, encode_header, encode_record, read_counts
from afserve.placement.rebalance.stats import DECODE, PREFILL, RoutingStats


def test_rows_are_counted_by_layer_and_class():
    stats = RoutingStats(2, 4, (10.0,))
    stats.merge([[0, 0, 0, 0], [1, 0, 1, 2]], DECODE)
    stats.merge([[5, 0, 0, 0], [0, 0, 0, 0]], PREFILL)
    stats.advance_windows(0.0)
    assert stats.window_load(0).tolist() == [[5, 0, 0, 0], [1, 0, 1, 2]]
    assert stats.window_load(0, PREFILL).tolist() == [[5, 0, 0, 0], [0, 0, 0, 0]]
    assert stats.total_counts(DECODE).tolist() == [[0, 0, 0, 0], [1, 0, 1, 2]]


def test_each_window_forgets_by_its_own_half_life():
    stats = RoutingStats(1, 2, (1.0, 4.0))
    stats.merge([[8, 0]])
    stats.advance_windows(10.0)
    stats.merge([[0, 3]])
    gathered = stats.advance_windows(12.0)
    assert gathered[DECODE].tolist() == [[0, 3]]
    assert stats.window_load(0)[0] == pytest.approx([2.0, 3.0])
    assert stats.window_load(1)[0] == pytest.approx([8 * 0.5**0.5, 3.0])
    assert stats.total_counts()[0].tolist() == [8, 3]


def test_time_that_runs_backwards_adds_nothing_twice():
    stats = RoutingStats(1, 1, (1.0,))
    stats.merge([[4]])
    stats.advance_windows(5.0)
    stats.advance_windows(3.0)
    assert stats.window_load(0)[0, 0] == 4.0
    stats.advance_windows(6.0)
    assert stats.window_load(0)[0, 0] == pytest.approx(2.0)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1), st.integers(0, 2**32 - 1)), max_size=6))
@settings(deadline=None)
def test_a_recording_comes_back_as_it_went(entries):
    data = encode_header("nano", 2, 3)
    for seconds, kind, value in entries:
        data += encode_record(seconds, kind, np.full((2, 3), value))
    recording = decode(data)
    assert (recording.model, recording.layers, recording.experts) == ("nano", 2, 3)
    assert [(r.seconds, r.kind, int(r.counts_LE[1, 2])) for r in recording.records] == entries
    assert recording.total_load()[0, 0] == sum(value for _, _, value in entries)


def test_a_recording_replays_into_statistics():
    data = encode_header("nano", 1, 2)
    data += encode_record(0.0, DECODE, [[4, 0]]) + encode_record(2.0, PREFILL, [[0, 6]])
    stats = RoutingStats(1, 2, (2.0,))
    assert list(decode(data).replay(stats)) == [0.0, 2.0]
    assert stats.window_load(0)[0] == pytest.approx([2.0, 6.0])


def test_a_record_cut_short_by_a_kill_is_left_out():
    whole = encode_header("m", 1, 2) + encode_record(1.0, 0, [[1, 2]])
    cut = whole + encode_record(2.0, 0, [[3, 4]])[:-1]
    assert len(decode(cut).records) == 1
    assert len(decode(whole + b"\x00\x01").records) == 1


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "AFROUTE1"),
        (b"PK\x03\x04 and so on, much longer than a header", "AFROUTE1"),
        (encode_header("m", 0, 2), "outside"),
        (encode_header("m", 2**31, 2**31 - 1), "outside"),
        (encode_header("m", 1, 2) + encode_record(1.0, 7, [[1, 2]]), "class 7"),
        (encode_header("m", 1, 3) + encode_record(1.0, 0, [[1, 2]]), "8 bytes of counts, not 12"),
        (encode_header("m", 1, 2) + encode_record(1.0, 0, [[1, 2]])[:13] + b"\xff" * 40, "damaged"),
    ],
)
def test_a_damaged_recording_is_one_clear_error(data, complaint):
    with pytest.raises(ConfigError, match=complaint):
        decode(data)


@pytest.mark.slow
def test_a_decompression_bomb_is_cut_off():
    bomb = zlib.compress(bytes(50_000_000), 9)
    data = encode_header("m", 1, 2) + (1.0).hex().encode()[:0] + encode_record(1.0, 0, [[1, 2]])[:9]
    data += len(bomb).to_bytes(4, "little") + bomb
    with pytest.raises(ConfigError, match="9 bytes of counts, not 8"):
        decode(data)
    assert data.startswith(MAGIC)


TABLE = [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        ({"counts": TABLE}, ["counts"]),
        (TABLE, ["counts"]),
        ({"counts": [TABLE, TABLE]}, ["0", "1"]),
        ({"counts": {"day": TABLE, "night": TABLE}}, ["day", "night"]),
        ({"model": "x", "domains": {"a": TABLE}}, ["a"]),
        ({"scenarios": [{"counts": TABLE}, {"counts": TABLE}]}, ["0", "1"]),
    ],
)
def test_plain_counts_in_every_form(raw, names):
    found = read_counts(json.dumps(raw))
    assert list(found) == names
    assert all(table.tolist() == TABLE for table in found.values())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", 'no "counts"'),
        ('{"counts": []}', "shape"),
        ('{"counts": {}}', "names no scenario"),
        ('{"counts": [[1, 2], [3]]}', "ragged"),
        ('{"counts": [[1, "2"]]}', "not numbers"),
        ('{"counts": [[1, true]]}', "not numbers"),
        ('{"counts": [[1, null]]}', "not numbers"),
        ('{"counts": [[1, -1]]}', "not negative"),
        ('{"counts": [[1, NaN]]}', "nan"),
        ('{"counts": [[1, Infinity]]}', "inf"),
        ('{"counts": [[1, 1e999]]}', "inf"),
        ('{"counts": {"a": [[1]], "b": [[1, 2]]}}', "differ in shape"),
        ('{"counts": 3}', "ragged or not numbers"),
    ],
)
def test_bad_counts_files_are_one_clear_error(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read_counts(text)
