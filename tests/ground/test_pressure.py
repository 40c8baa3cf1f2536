"""What the kernel says of waiting processors, and what it may say instead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.control.pressure import cpu_pressure, parse_pressure

LINE = "some avg10={:.2f} avg60=0.99 avg300=1.86 total=12819978\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


@given(st.floats(0.0, 100.0))
def test_the_share_of_the_last_ten_seconds(percent):
    assert parse_pressure(LINE.format(percent)) == pytest.approx(percent / 100, abs=1e-4)


@given(st.text() | st.text("some avg10=.0123456789-einf\n", max_size=60))
def test_whatever_stands_there_is_a_share_or_nothing(text):
    found = parse_pressure(text)
    assert found is None or 0.0 <= found <= 1.0


@pytest.mark.parametrize(
    "text", ["", "full avg10=3.0", "some avg60=3.0", "some avg10=nan", "some avg10=-1", "some avg10="]
)
def test_what_is_no_pressure(text):
    assert parse_pressure(text) is None


def test_a_kernel_without_it(tmp_path):
    assert cpu_pressure(tmp_path / "none") is None
    (tmp_path / "cpu").write_bytes(b"\xff\xfe")
    assert cpu_pressure(tmp_path / "cpu") is None
    (tmp_path / "cpu").write_text(LINE.format(87.5))
    assert cpu_pressure(tmp_path / "cpu") == 0.875
