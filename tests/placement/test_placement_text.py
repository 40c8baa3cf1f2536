"""Placement files that are none: each is refused by the name of the place, before it costs time or memory."""

import json
import math
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.errors import ConfigError
from afserve.placement import placement_text as plan_text
from afserve.placement.placement import Placement
from tests.work import Calls

BODY = 8 << 20
LAYER = {"slots": [[0, 1], [1, 2]], "share": [[1, 0.25], [0.75, 1]]}
GOOD = {"nodes": 2, "experts": 3, "epoch": 0, "layers": [LAYER]}
ODD = st.one_of(
    st.floats(),
    st.integers(),
    st.sampled_from([2**31, 2**63, 10**400, -1, -(10**300), 5e-324, 1e308, math.inf, -math.inf, math.nan]),
    st.sampled_from([None, True, False, "1", "", [], {}, [[]], [[0]], "\ud800"]),
)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"layers": [{"slots": [[0, 1], [1, 2]], "share": [[1, 0.25], [0.5, 1]]}]}, "sum to 0.75"),
        ({"layers": [{"slots": [[0, 1], [1, 2]], "share": [[1, 0.25], [0.75]]}]}, "2 slots but 1 shares"),
        ({"layers": [{"slots": [[0, 0], [1, 2]], "share": [[0.5, 0.5], [1, 1]]}]}, "stands there twice"),
        ({"layers": [{"slots": [[0, 9], [1, 2]], "share": [[1, 1], [1, 1]]}]}, "outside"),
        ({"layers": [{"slots": [[0, 1]], "share": [[1, 1]]}]}, "layer 0: has 1 nodes"),
        ({"layers": [{"slots": [[0, 1.5], [1, 2]], "share": [[1, 1], [1, 1]]}]}, "slots[0][1]: 1.5 is not"),
        ({"layers": [{"slots": [[0, True], [1, 2]], "share": [[1, 1], [1, 1]]}]}, "slots[0][1]: True is not"),
        (
            {"layers": [{"slots": [[0, 10**400], [1, 2]], "share": [[1]]}]},
            "slots[0][1]: an integer of 1329 bits",
        ),
        (
            {"layers": [{**LAYER, "share": [[1, math.nan], [1, 1]]}]},
            "layers[0].share[0][1]: nan is not a share",
        ),
        ({"layers": [{**LAYER, "share": [[1, 0.25], [0.75, -1e-9]]}]}, "share[1][1]: -1e-09 is not a share"),
        ({"layers": [{**LAYER, "share": [[1, 0.25], ["1", 1]]}]}, "share[1][0]: '1' is not a share"),
        ({"layers": [{**LAYER, "share": [[1, 0.25], 5]}]}, "layers[0].share[1]: 5 is not a list"),
        ({"layers": [{**LAYER, "max_load": math.inf}]}, "layers[0].max_load: inf is not"),
        ({"layers": [{**LAYER, "lower_bound": -1}]}, "layers[0].lower_bound: -1 is not"),
        ({"layers": [LAYER, {"share": [[1, 1]]}]}, "layers[1].slots: is missing"),
        ({"layers": [LAYER, 7]}, "layers[1]: 7 is not an object"),
        ({"layers": 3}, "layers: 3 is not a list"),
        ({"layers": []}, "layers: is empty"),
        ({"layers": [LAYER] * 4097}, "4,096 layers"),
        ({"experts": 10**12}, "experts: 1000000000000 is not a whole number in [1, 65536]"),
        ({"experts": 60_000}, "60000 experts in 4 slots"),
        ({"experts": 0}, "experts: 0 is not"),
        ({"nodes": 10**9}, "nodes: 1000000000 is not a whole number in [1, 65536]"),
        ({"nodes": 2.0}, "nodes: 2.0 is not"),
        ({"epoch": -1}, "epoch: -1 is not"),
        ({"epoch": 2**31}, "epoch: 2147483648 is not a whole number in [0, 2147483647]"),
    ],
)
def test_bad_files_are_one_clear_error(change, complaint):
    with pytest.raises(ConfigError) as caught:
        Placement.from_json(json.dumps({**GOOD, **change}))
    assert complaint in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        "[" * 100_000,
        '{"nodes": 1}',
        '{"nodes": null, "layers": []}',
        '{"nodes": ' + "9" * 5000,
    ],
)
def test_what_is_no_placement_file(text):
    with pytest.raises(ConfigError, match="not a placement file"):
        Placement.from_json(text)


def wide(rows):
    return json.dumps(
        {"nodes": 1, "layers": [{"slots": [list(range(60_000))], "share": [[1] * 60_000]}] * rows}
    )


WIDE = wide(18)


@pytest.mark.by_day(every=2)
@pytest.mark.parametrize(
    "text",
    [
        "[" + "[]," * (BODY // 3) + "[]]",
        "[" + "{}," * (BODY // 3) + "{}]",
        '{"layers":[' + '{"slots":[[],[]],"share":[[]]},' * (BODY // 33) + "1]}",
        "[" * BODY,
        '{"a":' * (BODY // 5),
        "[" + ("9" * 4000 + ",") * (BODY // 4001) + "1]",
        '{"nodes":1,"layers":[' + "1," * (BODY // 2) + "1]}",
        '{"nodes":1,"layers":[{"slots":[[' + "0," * (BODY // 2) + '0]],"share":[[1]]}]}',
        "x" * BODY,
        WIDE,
    ],
    ids=("lists", "objects", "layers", "deep", "deep keys", "digits", "entries", "slots", "text", "numbers"),
)
def test_a_large_body_of_garbage_is_refused_soon(text):
    with pytest.raises(ConfigError, match="placement"), Calls() as calls:
        Placement.from_json(text)
    looked_at = 36 * 60_000 if text is WIDE else 0  # its numbers, once each
    assert calls.made < looked_at + 1000


def test_what_is_refused_by_its_size_is_not_parsed():
    text = "[" + "[]," * (BODY // 3) + "[]]"
    tracemalloc.start()
    with pytest.raises(ConfigError, match="262,144 nodes"):
        Placement.from_json(text)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_too_much_text_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(plan_text, "MOST_CHARACTERS", 10)
    with pytest.raises(ConfigError, match="at most 10 are read"):
        Placement.from_json(" " * 11)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_one_odd_value_anywhere_is_named_or_harmless(data):
    """Whatever stands at one place of a good file: a refusal that names a place, or a placement of finite numbers."""
    raw = json.loads(json.dumps(GOOD))
    place: list[object] = []
    value = raw
    while isinstance(value, dict | list) and value and (not place or data.draw(st.booleans())):
        key = data.draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        place.append(key)
        value = value[key]
    holder = raw
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = data.draw(ODD)
    try:
        placement = Placement.from_json(json.dumps(raw))
    except ConfigError as error:
        named = any(str(key) in error.message for key in place if isinstance(key, str))
        assert named or error.message.startswith("placement layer 0")
    else:
        assert all(math.isfinite(s) and s >= 0 for y in placement.layers for row in y.share for s in row)
        assert 0 <= placement.epoch < 2**31
        assert Placement.from_json(placement.to_json()) == placement
