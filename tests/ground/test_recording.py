"""What a node drew in a moment survives the wire, within bounds, and bytes of strangers do not get in."""

import json
import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.errors import ProtocolError
from afserve.tracing.recording import MOST_BYTES, MOST_SLICES, Recording

args = st.dictionaries(
    st.text(max_size=4), st.integers(0, 1 << 40) | st.lists(st.text(max_size=3), max_size=3), max_size=3
)
times = st.floats(0, 1e9)
slices = st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5), times, times, args), max_size=9)


@given(st.text(max_size=9), times, times, slices.map(tuple))
@settings(max_examples=60, deadline=None)
def test_any_recording(node, began, ended, drawn):
    sent = Recording(node, began, ended, drawn)
    assert Recording.unpack(sent.pack()) == sent


@pytest.mark.slow
def test_the_latest_slices_go_where_there_are_too_many_and_the_end_says_so():
    sent = Recording("n", 0.0, 9.0, [("t", "x", i / 1e3, (i + 1) / 1e3, {}) for i in range(MOST_SLICES + 9)])
    got = Recording.unpack(sent.pack())
    assert got.slices == tuple(sent.slices[:MOST_SLICES]) and got.ended == MOST_SLICES / 1e3
    names = random.Random(1)
    words = ["".join(chr(names.randrange(32, 9000)) for _ in range(300)) for _ in range(1500)]
    wild = [("t", word, 0.0, 1.0, {}) for word in words]
    packed = Recording("n", 0.0, 9.0, wild).pack()
    assert len(packed) <= MOST_BYTES and 0 < len(Recording.unpack(packed).slices) < len(wild)


GOOD = ["t", "x", 0.0, 1.0, {}]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '["n", 0, 1]',
        json.dumps(["n", 0, "1", []]),
        json.dumps([7, 0, 1, []]),
        json.dumps(["n", 0, 1, [GOOD[:4]]]),
        json.dumps(["n", 0, 1, [[*GOOD[:4], {"layer": "x"}]]]),
        json.dumps(["n", 0, 1, [[*GOOD[:4], {"messages": [7]}]]]),
        '["n", 0, NaN, []]',
        '["n", 0, 1e999, []]',
        "[" * 100_000,
    ],
)
def test_what_is_no_recording(text):
    with pytest.raises(ProtocolError, match="no recording of a node"):
        Recording.unpack(zlib.compress(text.encode()))


@pytest.mark.slow
def test_what_is_not_even_text():
    whole = Recording("n", 0.0, 1.0, ()).pack()
    bomb = zlib.compress(b"[" + b" " * (64 << 20))
    for data in (b"", b"\x00", whole[:-1], bomb):
        with pytest.raises(ProtocolError, match="no recording of a node"):
            Recording.unpack(data)
