"""What `afserve doctor` says of instruction sets: those there are, and those that somebody hides."""

from pathlib import Path

import pytest

from afserve.launch.plan.checkup import instructions
from afserve.launch.plan.checkup_disk import NOTE, OK
from afserve.launch.plan.processors import ProcessorModel, cpu_flags

INFO = """processor\t: 0
vendor_id\t: {vendor}
cpu family\t: {family}
model\t\t: {model}
model name\t: anything : at all
flags\t\t: fpu avx2 fma

processor\t: 1
vendor_id\t: other
flags\t\t: none
"""


def model(tmp_path: Path, vendor: str, family: int, number: int) -> ProcessorModel:
    path = tmp_path / "cpuinfo"
    path.write_text(INFO.format(vendor=vendor, family=family, model=number))
    assert cpu_flags(path) == {"fpu", "avx2", "fma"}
    return ProcessorModel.read(path)


@pytest.mark.parametrize(
    ("vendor", "family", "number", "best"),
    [
        ("GenuineIntel", 6, 143, "amx"),
        ("GenuineIntel", 6, 85, "avx512"),
        ("GenuineIntel", 6, 151, "avx2"),
        ("GenuineIntel", 6, 9999, ""),
        ("AuthenticAMD", 25, 33, "avx2"),
        ("AuthenticAMD", 25, 97, "avx512bf16"),
        ("AuthenticAMD", 26, 2, "avx512bf16"),
        ("SomebodyElse", 6, 143, ""),
    ],
)
def test_what_a_model_has(tmp_path: Path, vendor: str, family: int, number: int, best: str) -> None:
    assert model(tmp_path, vendor, family, number).best_isa() == best


def test_what_is_hidden_is_said(tmp_path: Path) -> None:
    sapphire = model(tmp_path, "GenuineIntel", 6, 143)
    found = instructions(("avx512", "avx2", "generic"), sapphire)
    assert (
        found.level == NOTE and "avx512 is used, the best one; --isa may also be avx2, generic" in found.found
    )
    assert "model 143) have amx" in found.advice and "hides it" in found.advice
    assert instructions(("amx", "avx2"), sapphire).level == OK
    assert instructions(("avx512bf16fma", "generic"), model(tmp_path, "GenuineIntel", 6, 85)).level == OK
    assert instructions((), sapphire).level == NOTE
    assert instructions(("generic",), ProcessorModel()).level == OK


def test_a_system_without_cpuinfo(tmp_path: Path) -> None:
    assert ProcessorModel.read(tmp_path / "none") == ProcessorModel() and not cpu_flags(tmp_path / "none")
    (tmp_path / "arm").write_text("processor : 0\nFeatures : fp asimd\nCPU part : 0xd0c\n")
    assert (
        cpu_flags(tmp_path / "arm") == {"fp", "asimd"}
        and not ProcessorModel.read(tmp_path / "arm").best_isa()
    )
