"""What the system says of its processor, and what processors of that model have: /proc/cpuinfo, read.

A model's instruction set is known only where every processor of it has that; others are not judged.
"""

import platform
from dataclasses import dataclass
from pathlib import Path

INFO = Path("/proc/cpuinfo")
_INTEL, _AMD = "GenuineIntel", "AuthenticAMD"
_MODELS: dict[tuple[str, int], dict[int, str]] = {
    (_INTEL, 6): {
        **dict.fromkeys((0x55, 0x6A, 0x6C), "avx512"),  # Skylake to Cooper Lake, Ice Lake
        **dict.fromkeys((0x8F, 0xCF, 0xAD, 0xAE), "amx"),  # Sapphire and Emerald Rapids, Granite Rapids
        **dict.fromkeys((0x3C, 0x3F, 0x45, 0x46, 0x3D, 0x47, 0x4F, 0x56), "avx2"),  # Haswell, Broadwell
        **dict.fromkeys((0x4E, 0x5E, 0x8E, 0x9E, 0xA5, 0xA6), "avx2"),  # Skylake to Comet Lake, of desktops
        **dict.fromkeys((0x97, 0x9A, 0xB7, 0xBA, 0xBF, 0xAA, 0xC5, 0xC6), "avx2"),  # Alder Lake to Arrow Lake
    },
    (_AMD, 0x17): dict.fromkeys(range(0x100), "avx2"),  # Zen, Zen 2
    (_AMD, 0x1A): dict.fromkeys(range(0x100), "avx512bf16"),  # Zen 5
    (_AMD, 0x19): {  # Zen 3 beside Zen 4
        model: "avx512bf16" if 0x10 <= model < 0x20 or 0x60 <= model < 0xB0 else "avx2"
        for model in range(0x100)
    },
}


@dataclass(frozen=True, slots=True)
class ProcessorModel:
    """As the system names it; `vendor` is empty where it names none."""

    vendor: str = ""
    family: int = 0
    number: int = 0

    @classmethod
    def read(cls, path: Path = INFO) -> "ProcessorModel":
        fields = _first(path)
        numbers = [fields.get(name, "") for name in ("cpu family", "model")]
        if not all(number.isdigit() for number in numbers):
            return cls()
        return cls(fields.get("vendor_id", ""), *map(int, numbers))

    def best_isa(self) -> str:
        """The best set of the native library that all processors of this model have; empty where none is known."""
        return _MODELS.get((self.vendor, self.family), {}).get(self.number, "")

    def __str__(self) -> str:
        return f"{self.vendor} family {self.family}, model {self.number}"


def cpu_flags(path: Path = INFO) -> frozenset[str]:
    fields = _first(path)
    return frozenset(fields.get("flags", fields.get("features", "")).split())


def processor_name(path: Path = INFO) -> str:
    return _first(path).get("model name", "") or platform.processor() or platform.machine()


def _first(path: Path) -> dict[str, str]:
    """What stands there of the first processor, by lower-case name."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip().lower(): value.strip() for name, _, value in lines}
