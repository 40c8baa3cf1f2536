"""What a check-up found, as a value."""

from dataclasses import dataclass

OK, NOTE, BAD = "ok", "note", "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """`level` is ok, note (works without, slower or less) or missing (does not work); `advice` how to get it."""

    what: str
    level: str
    found: str
    advice: str = ""
