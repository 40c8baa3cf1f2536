"""When a request has its turn and how long it may take, in the words of several APIs."""

from dataclasses import dataclass

from afserve.engine.scheduling.request import MAX_PRIORITY, MAX_SALT
from afserve.errors import RequestError, shown
from afserve.server.bodies.fields import Fields, or_else

# OpenAI's tiers; the lowest number runs first. Batches come after everything else.
TIERS = {"auto": 0, "default": 0, "priority": -100, "flex": 100, "scale": 0}
BATCH_PRIORITY = 1000
LONGEST_SECONDS = 86_400.0


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
    tier = or_else(fields.text("service_tier"), "auto")
    if tier not in TIERS:
        raise RequestError(f"service_tier: {shown(tier)} is none of {', '.join(TIERS)}", param="service_tier")
    salt = or_else(fields.text("cache_salt"), "")
    if len(salt) > MAX_SALT:
        raise RequestError(
            f"cache_salt: has {len(salt)} characters, at most {MAX_SALT} are allowed", param="cache_salt"
        )
    return Scheduling(
        or_else(fields.integer("priority", -MAX_PRIORITY, MAX_PRIORITY), TIERS[tier]),
        salt,
        fields.number("deadline", 0.001, LONGEST_SECONDS),
        fields.number("ttft", 0.001, LONGEST_SECONDS),
        fields.number("tpot", 0.0001, LONGEST_SECONDS),
        tier="default" if tier == "auto" else tier,
    )
