"""Classes of service of a replay's requests: which there are, and which share of the requests is of each."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from afserve.cli.options import existing_file, option
from afserve.control.pilot.classes import ClassAim, wanted_of
from afserve.control.pilot.replay.counts import Packet
from afserve.control.pilot.sizes import TargetTimes
from afserve.errors import ConfigError, shown
from afserve.server.access.classes import read_classes

_CLOSE = 1e-3  # of a sum of shares
_OF_NONE = ClassAim("")


@dataclass(frozen=True, slots=True)
class ClassFlags:
    """Classes of service."""

    classes: Path | None = option(
        type=existing_file,
        help="Classes of service, as `afserve up` reads them; each is judged by its own times, and has its turn.",
    )
    shares: str | None = option(
        metavar="NAME=SHARE[,...]",
        help="Of all requests, of each class; drawn at random.  [default: all alike]",
    )


@dataclass(frozen=True, slots=True)
class ClassShares:
    """`shares` of all requests add up to 1, one for each of `aims`."""

    aims: tuple[ClassAim, ...] = (_OF_NONE,)
    shares: tuple[float, ...] = (1.0,)

    def wanted(self, own: TargetTimes) -> TargetTimes:
        """By whoever knows the shares."""
        if self.aims == (_OF_NONE,):
            return own
        return wanted_of(own, [pair for pair in zip(self.shares, self.aims, strict=True) if pair[0]])

    def drawn(self, packets: list[Packet], seed: int) -> list[Packet]:
        """The same, each of a class."""
        if len(self.aims) == 1:
            return packets
        rng = np.random.default_rng((seed, 1))
        kinds = rng.choice(len(self.aims), len(packets), p=self.shares).tolist()
        return [replace(one, kind=kind) for one, kind in zip(packets, kinds, strict=True)]


def class_shares(flags: ClassFlags) -> ClassShares:
    """Raises ConfigError naming the flag."""
    if flags.classes is None:
        if flags.shares is not None:
            raise ConfigError("--shares: does nothing without --classes", param="shares")
        return ClassShares()
    aims = tuple(one.aim for one in read_classes(flags.classes).all)
    if flags.shares is None:
        return ClassShares(aims, (1 / len(aims),) * len(aims))
    pairs = [_share(one) for one in flags.shares.split(",")]
    said = dict(pairs)
    if twice := [name for name in said if sum(name == other for other, _ in pairs) > 1]:
        raise ConfigError(f"--shares: {shown(twice[0])} has more than one share", param="shares")
    names = [one.name for one in aims]
    if unknown := [name for name in said if name not in names]:
        raise ConfigError(
            f"--shares: {shown(unknown[0])} is none of {', '.join(names)} in --classes", param="shares"
        )
    if abs(sum(said.values()) - 1) > _CLOSE:
        raise ConfigError(f"--shares: add up to {sum(said.values()):g}, not to 1", param="shares")
    whole = sum(said.values())
    return ClassShares(aims, tuple(said.get(name, 0.0) / whole for name in names))


def _share(text: str) -> tuple[str, float]:
    name, _, said = text.partition("=")
    try:
        share = float(said)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(
            f"--shares: {shown(text)} is not NAME=SHARE with a share from 0 to 1, such as chat=0.7",
            param="shares",
        )
    return name.strip(), share
