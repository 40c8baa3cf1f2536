"""How GGUF files store numbers: names of ggml's types, and how many bytes a block of so many numbers takes.

Source: `ggml_type` and the block structures of ggml-common.h. Types that nothing here reads have no row.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """`numbers` that lie side by side in a row take `size` bytes together."""

    name: str
    numbers: int
    size: int

    @property
    def plain(self) -> bool:
        return self.numbers == 1

    def row_bytes(self, numbers: int) -> int:
        return numbers // self.numbers * self.size


_ROWS = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (20, "IQ4_NL", 32, 18),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (30, "BF16", 1, 2),
    (39, "MXFP4", 32, 17),
)
KINDS: dict[int, GgmlType] = {number: GgmlType(name, numbers, size) for number, name, numbers, size in _ROWS}
"""The number that a file has for it -> kind."""

PACKED: dict[str, GgmlType] = {kind.name: kind for kind in KINDS.values() if not kind.plain}
"""Those of several numbers to a block, by name."""
