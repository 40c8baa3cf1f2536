"""What a gateway counts of the requests that it answers, as it says to the controller: sums since its beginning."""

from dataclasses import dataclass, fields

from afserve.counters import counter


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """First tokens and the rest of an answer are late where they missed the time that the request, or the server, asks
    for. Its own /metrics have the same by name."""

    came: int = counter(0, "Sequences that were asked for.")
    prompt_tokens: int = counter(0, "Tokens of their prompts.")
    found_tokens: int = counter(0, "Of these, in caches.")
    first: int = counter(0, "First tokens.")
    first_late: int = counter(0, "Of these, late.")
    ended: int = counter(0, "Sequences that ended.")
    answer_tokens: int = counter(0, "Their tokens.")
    rest_tokens: int = counter(0, "Of these, behind the first.")
    rest_late: int = counter(0, "Sequences whose further tokens were late.")
    first_seconds: float = counter(0.0, "Seconds to first tokens.")
    rest_seconds: float = counter(0.0, "Seconds from first tokens to last.")


def added(loads: "list[GatewayLoad]") -> GatewayLoad:
    """Of several gateways."""
    return GatewayLoad(*(sum(getattr(one, each.name) for one in loads) for each in fields(GatewayLoad)))
