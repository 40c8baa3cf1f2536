"""What tests of properties draw by day."""

import importlib
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.slow
@pytest.mark.skipif("not settings().derandomize", reason="drawn by night")
def test_a_module_that_was_loaded_in_between_changes_nothing(tmp_path, monkeypatch):
    drawn = []

    @settings(max_examples=60)
    @given(st.integers(), st.floats(), st.text(max_size=40))
    def draw(whole, real, text):
        drawn.append(repr((whole, real, text)))

    draw()
    before = drawn.copy()
    drawn.clear()
    monkeypatch.syspath_prepend(tmp_path)
    numbers = ", ".join(f"{7**power}, {0.3 * power}, 'word {power}'" for power in range(10, 40))
    (tmp_path / "loaded_in_between.py").write_text(f"NUMBERS = [{numbers}]\n")
    importlib.import_module("loaded_in_between")
    try:
        draw()
    finally:
        del sys.modules["loaded_in_between"]
    assert drawn == before and len(set(before)) > 30
