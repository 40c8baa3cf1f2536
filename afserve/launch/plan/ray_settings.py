"""What a user says of Ray: which cluster, what a node of each role needs of it, and how the nodes are spread over it.

Values only; Ray itself is imported by `ray_helper.py` and nowhere else.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from afserve.config_ranges import Range
from afserve.errors import ConfigError, shown
from afserve.member import Role
from afserve.settings import check, flag_of, setting

PLACEMENTS = ("spread", "pack", "strict-spread", "strict-pack")
AUTO = "auto"
_ACCELERATOR = "accelerator"  # accelerator=H20 stands for a trace of Ray's resource accelerator_type:H20
_TRACE = 0.001
_MOST = Range(0.0001, 1e15, whole=False)
Bundle = Mapping[str, float]  # what one node takes, by Ray's names of resources


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """`ray` None starts nothing on Ray."""

    TOPIC: ClassVar[str] = "ray"

    ray: str | None = setting(
        None,
        "Start the nodes on a Ray cluster: the one of this machine, or the one at ADDRESS.",
        metavar="[ADDRESS]",
        bare=AUTO,
        common=True,
    )
    ray_attention: str | None = setting(
        None,
        "Ray's resources of each attention node: CPU=4,GPU=1,accelerator=H20, or a number of CPUs.",
        metavar="NAME=AMOUNT,...",
    )
    ray_experts: str | None = setting(
        None, "The same of each expert node, such as CPU=8.", metavar="NAME=AMOUNT,..."
    )
    ray_placement: str = setting(
        "spread", "How the nodes of each role lie on Ray's hosts; strict: so or not at all.", PLACEMENTS
    )
    ray_wait: float = setting(
        300.0,
        "Seconds that Ray may take to find room for the nodes.",
        Range(1, 86_400, whole=False),
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        check(self, flag_of)
        for name in ("ray_attention", "ray_experts"):
            if (text := getattr(self, name)) is not None:
                bundle_of(flag_of(name), text)

    def bundle(self, role: Role, *, cuda: bool) -> Bundle:
        """What Ray sets aside for one node of a role: one CPU, and one GPU where the run's device is CUDA."""
        name = "ray_experts" if role is Role.EXPERT else "ray_attention"
        if (text := getattr(self, name)) is not None:
            return bundle_of(flag_of(name), text)
        return {"CPU": 1.0, "GPU": 1.0} if cuda else {"CPU": 1.0}


def bundle_of(flag: str, text: str) -> Bundle:
    """`CPU=4,GPU=1,accelerator=H20` as Ray's resources; a number alone is of CPUs.

    Raises ConfigError with the part that is none.
    """
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, amount = (
            word.strip() for word in (part if "=" in part else f"CPU={part}").partition("=")
        )
        if name == _ACCELERATOR and amount:
            name, amount = f"accelerator_type:{amount}", str(_TRACE)
        number = _number(amount)
        if not name or not equals or number is None or name in found:
            raise ConfigError(
                f"{flag}: {shown(part)} is not NAME=AMOUNT with one of Ray's resources, each named once, such as "
                "CPU=4,GPU=1,accelerator=H20",
                param=flag[2:].replace("-", "_"),
            )
        found[name] = number
    if not found:
        raise ConfigError(f"{flag}: names no resource; write such as CPU=4", param=flag[2:].replace("-", "_"))
    return found


def in_words(bundle: Bundle) -> str:
    """As users write it."""
    return ",".join(f"{name}={amount:g}" for name, amount in bundle.items())


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and _MOST.holds(number) else None
