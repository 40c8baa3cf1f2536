"""Which phases the attention nodes of a run may have together: values in, ConfigErrors out.

A prefill node computes prompts for decode nodes, so there are none of the one without any of the other. Nodes that do
both need nobody.
"""

from collections import Counter
from collections.abc import Iterable

from afserve.errors import ConfigError
from afserve.member import AttentionPhase


def check_phases(after: Iterable[AttentionPhase], what: str) -> None:
    """Raises ConfigError where attention nodes in these phases cannot serve. `what` was asked for."""
    count = Counter(after)
    if count[AttentionPhase.PREFILL] and not count[AttentionPhase.DECODE]:
        raise ConfigError(
            f"{what}: leaves prefill nodes and no decode node that they could compute prompts for; add a decode node "
            "first, or make a node one with --phase, such as attention-1=decode",
            param="phase",
        )
