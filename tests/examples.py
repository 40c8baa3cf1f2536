"""Which examples tests of properties draw: by day the same ones on every run, by night others each time.

By day an example depends on nothing but its test. So hypothesis does not look for constants in the modules that are
loaded then: which those are depends on the tests that ran before in the same process. By night it does, and says with a
failure how it is drawn again. A busy machine may take the cores for seconds: no example has a deadline, and drawing one
takes what it takes.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

QUICK_EXAMPLES, DAY_EXAMPLES = 5, 10  # where a test does not say how many it asks for
_COMMON = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
_look_for_constants = providers._get_local_constants


def draw_by_day() -> None:
    """To be called before tests are imported."""
    settings.register_profile("day", _COMMON, derandomize=True, max_examples=DAY_EXAMPLES)
    settings.load_profile("day")
    providers._get_local_constants = lambda: providers._local_constants


def draw_few() -> None:
    """Of those by day."""
    settings.register_profile("quick", settings.get_profile("day"), max_examples=QUICK_EXAMPLES)
    settings.load_profile("quick")


def draw_by_night() -> None:
    """By any seed, or by what `--hypothesis-seed` says. To be called before tests are imported."""
    settings.register_profile("night", _COMMON, derandomize=False, print_blob=True)
    settings.load_profile("night")
    providers._get_local_constants = _look_for_constants


def draw_at_most(item: pytest.Item, most: Callable[[int], int]) -> None:
    """A test's own number of examples, of which `most` is given, overrules the profile's."""
    method = getattr(item, "obj", None)
    function: Any = getattr(method, "__func__", method)
    own = getattr(function, "_hypothesis_internal_use_settings", None)
    if own is not None:
        few = min(own.max_examples, most(own.max_examples))
        function._hypothesis_internal_use_settings = settings(own, max_examples=few)
