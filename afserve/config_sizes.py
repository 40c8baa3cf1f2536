"""Sizes in bytes as users write them: 100GiB, 500 MB."""

import re

from afserve.errors import ConfigError, shown

_UNITS = {f"{letter}{end}": base ** (power + 1)
          for power, letter in enumerate("KMGT") for end, base in (("iB", 1024), ("B", 1000))}  # fmt: skip
_LEAST, _MOST = 1 << 20, 1 << 50


def bytes_of(name: str, text: str) -> int:
    """Raises ConfigError naming the setting where the text is no size between 1 MiB and 1,024 TiB."""
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?([a-z]+)", text.strip().lower())
    if found is None or found[2] not in units:
        raise ConfigError(
            f"{name}: {shown(text)} is not a size such as 100GiB", param=name.strip("-").replace("-", "_")
        )
    size = int(float(found[1]) * units[found[2]])
    if not _LEAST <= size <= _MOST:
        raise ConfigError(
            f"{name}: {shown(text)} is outside [1MiB, 1024TiB]", param=name.strip("-").replace("-", "_")
        )
    return size
