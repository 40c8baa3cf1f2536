"""Chat fields in another API's names: by look-up, whatever the number of names."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.errors import RequestError
from afserve.server.bodies.prepared import ContextLengthError
from afserve.server.surfaces.anthropic import NAMES
from afserve.server.surfaces.translate import named, own_name

steps = st.lists(st.sampled_from(["a", "b", "[0]", "[12]"]), min_size=1, max_size=5)
params = steps.map(lambda parts: re.sub(r"\.(?=\[)", "", ".".join(["x", *parts])))
names = st.dictionaries(params, st.sampled_from(["y", "y.z", "w[3]", "w[3].v"]), max_size=6)


def by_patterns(param, names):
    """The longest name that matches, each tried by itself."""
    found = [
        (len(name), own) for name, own in names.items() if re.match(re.escape(name) + r"(?=[.\[]|$)", param)
    ]
    length, own = max(found, default=(0, ""))
    return own + param[length:]


@given(params, names)
def test_the_longest_name_counts(param, given_names):
    assert own_name(param, given_names) == by_patterns(param, given_names)


class Counted(dict):
    asked = 0

    def __contains__(self, key):
        Counted.asked += 1
        return super().__contains__(key)

    def get(self, key, default=None):
        Counted.asked += 1
        return super().get(key, default)

    def __iter__(self):
        raise AssertionError("names are looked up, not tried one after the other")

    items = keys = values = __iter__


@pytest.mark.slow
def test_a_refusal_among_many_names_costs_a_few_look_ups():
    many = Counted({f"messages[{i}]": f"input[{i + 3}]" for i in range(200_000)})
    with pytest.raises(ContextLengthError) as refused, named(many):
        raise ContextLengthError("messages[7].content: is null", param="messages[7].content")
    assert refused.value.param == "input[10].content"
    assert refused.value.message == "input[10].content: is null"
    assert Counted.asked <= 8


def test_a_field_whose_name_a_client_made_up_costs_no_more():
    Counted.asked = 0
    assert own_name("options" + ".a[" * 100_000, Counted(options="config")) == "config" + ".a[" * 100_000
    assert Counted.asked <= 1024


@pytest.mark.parametrize(
    "chat, own",
    [
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("stop", "stop_sequences"),
        ("stopped", "stopped"),
        ("temperature", "temperature"),
    ],
)
def test_anthropics_names(chat, own):
    with pytest.raises(RequestError) as refused, named(NAMES):
        raise RequestError(f"{chat}: wrong", param=chat)
    assert (refused.value.param, refused.value.message) == (own, f"{own}: wrong")
