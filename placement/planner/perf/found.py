"""KV of prompts that is found and not computed: which share of the prompt tokens is where, and how fast it comes.

It says how long that takes; what is not found is computed, and `stages.py` says how long that takes. It knows no files.
"""

import re
from dataclasses import dataclass

from afserve.errors import ConfigError, shown

MEMORY, *BELOW = TIERS = ("memory", "peer", "host", "disk")
_SLOWEST, _FASTEST = 1e-3, 1e5  # GB/s
_WRITTEN = re.compile(r"([a-z]+)=([0-9.e+-]+)(?:@([0-9.e+-]+))?")


@dataclass(frozen=True, slots=True)
class FoundTier:
    """`share` of all prompt tokens, 0 to 1; `rate` in bytes/s for each attention rank, infinite in its own memory."""

    name: str
    share: float
    rate: float = float("inf")


@dataclass(frozen=True, slots=True)
class Found:
    """By tier; nothing is found by default."""

    tiers: tuple[FoundTier, ...] = ()

    def __str__(self) -> str:
        return ", ".join(
            f"{tier.share:.0%} {tier.name}" + (f" at {tier.rate / 1e9:g} GB/s" if tier.name != MEMORY else "")
            for tier in self.tiers
        )

    @property
    def found_share(self) -> float:
        """Of the prompt tokens that need not be computed."""
        return sum(tier.share for tier in self.tiers)

    def fetch_seconds(self, size: float) -> float:
        """Until what is found of a prompt, whose whole cache has `size` bytes, is in the rank's memory."""
        return sum(tier.share * size / tier.rate for tier in self.tiers)


def parse_found(texts: tuple[str, ...]) -> Found:
    """Of --found: TIER=SHARE in the rank's memory, TIER=SHARE@GB/s elsewhere. Raises ConfigError naming the value."""
    found = Found(tuple(_tier(text) for text in texts))
    names = [tier.name for tier in found.tiers]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"--found {twice}: given twice; add the shares")
    if found.found_share >= 1:
        raise ConfigError(
            f"--found: {found.found_share:.0%} of the prompt tokens; the last token of a prompt is always computed, "
            "so all shares must be below 100 %"
        )
    return found


def _tier(text: str) -> FoundTier:
    written = _WRITTEN.fullmatch(text.strip())
    name, share, rate = written.groups() if written else ("", "", None)
    if name not in TIERS or not 0 < _number(share) < 1 or (rate is None) != (name == MEMORY):
        raise ConfigError(
            f"--found {shown(text)}: write memory=SHARE, or peer, host or disk=SHARE@GB/s, with a share above 0 and "
            "below 1, such as host=0.3@20"
        )
    if rate is None:
        return FoundTier(name, float(share))
    if not _SLOWEST <= _number(rate) <= _FASTEST:
        raise ConfigError(f"--found {shown(text)}: {shown(rate)} GB/s is not {_SLOWEST:g} to {_FASTEST:g}")
    return FoundTier(name, float(share), float(rate) * 1e9)


def _number(text: str) -> float:
    """0 where it is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0
