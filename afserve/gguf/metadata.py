"""What a GGUF file says of its model, by key: typed, and refused by the key's name.

Keys of a model are below its architecture, such as `qwen3moe.block_count`. What they mean is not known here.
"""

import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import NoReturn

from afserve.errors import CheckpointError, shown
from afserve.gguf.header import Value

_DIGITS = range(6, 10)  # a float32 is told apart from all others by nine at most


class Metadata:
    """`where` is the file. Raises CheckpointError."""

    def __init__(self, values: Mapping[str, Value], where: str) -> None:
        self._values, self.where = values, where
        self.architecture = self.string("general.architecture")

    def has(self, key: str) -> bool:
        return key in self._values

    def own(self, key: str) -> str:
        """The whole name of one of the model's own keys."""
        return f"{self.architecture}.{key}"

    def string(self, key: str, default: str | None = None) -> str:
        found = self._found(key, default)
        if not isinstance(found, str):
            self.refuse(key, "is no text")
        return found

    def number(self, key: str, default: int | float | None = None) -> int | float:
        """Of one for each layer all have to be the same."""
        found = self._found(key, default)
        if isinstance(found, Sequence) and not isinstance(found, str) and len(set(found)) == 1:
            found = found[0]
        if isinstance(found, bool) or not isinstance(found, int | float):
            self.refuse(key, "is not one number")
        return found if isinstance(found, int) else _shortest(found)

    def integer(self, key: str, default: int | None = None) -> int:
        found = self.number(key, default)
        if not isinstance(found, int):
            self.refuse(key, "is no whole number")
        return found

    def is_set(self, key: str, default: bool) -> bool:
        found = self._found(key, default)
        if not isinstance(found, bool):
            self.refuse(key, "is neither true nor false")
        return found

    def texts(self, key: str) -> Sequence[str]:
        """A list of texts; empty where there is none."""
        found = self._values.get(key, [])
        if not isinstance(found, list):
            self.refuse(key, "is no list of texts")
        return found

    def numbers(self, key: str) -> Sequence[int] | Sequence[float]:
        found = self._values.get(key, array("q"))
        if not isinstance(found, array):
            self.refuse(key, "is no list of numbers")
        return found

    def keys_below(self, stem: str) -> list[str]:
        return sorted(key for key in self._values if key.startswith(stem))

    def refuse(self, key: str, why: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {key}: {shown(self._values.get(key))} {why}")

    def _found(self, key: str, default: Value | None) -> Value:
        found = self._values.get(key, default)
        if found is None:
            raise CheckpointError(
                f"{self.where}: {key}: missing; convert the model again with a newer llama.cpp"
            )
        return found


def _shortest(found: float) -> float:
    """As somebody would have written what float32 holds: 1e-6 rather than 9.99999997e-07."""
    for digits in _DIGITS:
        short = float(f"{found:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", found):
            return short
    return found
