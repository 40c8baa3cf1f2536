"""When a request has its turn and how long it may take, in the words of several APIs."""

from dataclasses import dataclass

from afserve.server.bodies.declared import TIERS, SchedulingFields
from afserve.server.bodies.fields import Fields

BATCH_PRIORITY = 1000  # after everything else


@dataclass(frozen=True, slots=True)
class Scheduling:
    """`deadline` in seconds from the request's arrival; None for no end. A request whose first token is predicted to
    take longer than `ttft` seconds, or its further ones `tpot` each, is refused at once; None asks for nothing. The
    `tenant` and its `share` are the key's, never what a client writes. `tier` is what an answer calls it."""

    priority: int = 0
    cache_salt: str = ""
    deadline: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    tenant: str = ""
    share: int = 1
    tier: str = "default"


def scheduling_of(fields: Fields) -> Scheduling:
    given = SchedulingFields.given(fields)
    tier = given.pop("service_tier", "auto")
    return Scheduling(**{"priority": TIERS[tier], **given}, tier="default" if tier == "auto" else tier)
