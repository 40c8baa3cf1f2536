"""Dynamo's `nvext`: what its agents say of a request, in this server's words.

Read are `agent_hints.priority` (higher is sooner there), `agent_hints.speculative_prefill` (false: nothing is computed
ahead for the next turn) and `cache_control` (how long the prompt is to stay). Its other fields tell its own router
something that is measured here, and change no answer.
"""

import re
from collections.abc import Mapping

from afserve.engine.scheduling.request import MAX_PRIORITY, MAX_RETAIN
from afserve.errors import RequestError, shown
from afserve.server.bodies.fields import Fields, or_else

TTL_SECONDS = {"5m": 300.0, "1h": 3600.0}
_TTL = re.compile(r"([1-9]\d{0,5})(s|m|h)?")
_UNITS = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def hints_of(fields: Fields) -> Mapping[str, object]:
    """As fields of `Scheduling`. Raises RequestError that names the field."""
    hints = fields.section("nvext")
    if hints is None:
        return {}
    found: dict[str, object] = {}
    agent, kept = hints.section("agent_hints"), hints.section("cache_control")
    if agent is not None:
        priority = agent.integer("priority", -MAX_PRIORITY, MAX_PRIORITY)
        if priority is not None:
            found["priority"] = -priority
        found["ahead"] = agent.flag("speculative_prefill", True)
    if kept is not None:
        found["retain"] = _seconds(kept)
    return found


def _seconds(kept: Fields) -> float:
    if kept.get("type") != "ephemeral":
        raise kept.refusal("type", f"{shown(kept.get('type'))} is not ephemeral")
    ttl = or_else(kept.get("ttl"), "5m")
    told = _TTL.fullmatch(str(ttl)) if isinstance(ttl, str | int) and not isinstance(ttl, bool) else None
    if told is None:
        raise RequestError.about(kept.path_of("ttl"), f"{shown(ttl)} is no time such as 5m, 1h or 300")
    return min(MAX_RETAIN, float(told[1]) * _UNITS[told[2]])
