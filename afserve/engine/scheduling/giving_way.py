"""Which running sequence leaves for a waiting one of another tenant that finds no place, or no room for its prompt.

Long answers would keep their places, and other tenants waiting, until they end. So a tenant that was given more than
its share gives places back: where it gets ahead further with those it has, and once it is ahead by what it costs to
compute a sequence again. A sequence that has entered makes some tokens before it leaves. Within a tenant only those
step back that nothing was computed for. It decides and does nothing: a preemption is the scheduler's.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from afserve.engine.scheduling.fair_share import FairShares
from afserve.engine.scheduling.sequence import Sequence

AHEAD = 256  # tokens beyond its share from which on a tenant gives places back,
AGAIN = 4  # or the tokens that the sequence has computed, divided by this, where that is more
FAR = 4  # times so many more, from which on it gives back also where it has few places
MADE = 64  # tokens that a sequence makes between entering and leaving, for another tenant


def gives_way(shares: FairShares, wanting: Sequence, running: Iterable[Sequence]) -> Sequence | None:
    """Who leaves for one of another tenant: of the lowest priority, which is never above its own, of the tenant that is
    furthest ahead, the one with the least to compute again."""
    if not shares.several:
        return None
    running = list(running)
    leaves = _leaving(shares, wanting, Counter(s.request.tenant.name for s in running))
    return max(
        filter(leaves, running),
        key=lambda s: (s.request.priority, shares.given(s.request.tenant.name), -s.computed, s.order),
        default=None,
    )


def steps_back(wanting: Sequence, running: Iterable[Sequence]) -> Sequence | None:
    """Who gives its place to one of its own tenant whose turn is before its own, at no cost: nothing was computed for
    it since it entered. The last of those."""
    name, rank = wanting.request.tenant.name, wanting.prompt_rank
    untouched = (s for s in running if s.untouched and s.prompt_rank > rank and s.request.tenant.name == name)
    return max(untouched, key=lambda s: s.prompt_rank, default=None)


def _leaving(shares: FairShares, wanting: Sequence, places: Counter[str]) -> Callable[[Sequence], bool]:
    """`places` are the running sequences of each tenant."""
    mine, priority = wanting.request.tenant, wanting.request.priority

    def leaves(one: Sequence) -> bool:
        its = one.request.tenant
        if one.in_flight or one.made < MADE or one.request.priority < priority or its.name == mine.name:
            return False
        least = max(AHEAD, one.computed // AGAIN)
        further = places[its.name] * mine.share > places[mine.name] * its.share
        ahead = (shares.given(its.name) - shares.given(mine.name)) * its.share
        return ahead > (least if further else least + FAR * AHEAD)

    return leaves
