"""Turns an advice into changes of a deployment: nodes that are there take another part first, and others come or go.

An attention node that reads prompts can decode from one moment to the next, and the reverse. An attention node and an
expert node change places where there is no memory for one more beside them: the process of one ends, and the other's
starts on its host.
"""

from collections.abc import Callable, Sequence

from afserve.control.pilot.settings import pool_names
from afserve.control.pilot.sizes import PoolSizes
from afserve.control.wire.change_values import PHASE_POOLS, Change, Changed, NewPhase, NewRole, ScaleTo
from afserve.errors import DoesNotFitError
from afserve.member import Role

_ROLES = {
    "prefill": Role.ATTENTION,
    "decode": Role.ATTENTION,
    "attention": Role.ATTENTION,
    "experts": Role.EXPERT,
}


class PoolChanges:
    """`change` does as people ask, `names` are those of the nodes of a pool that stay, in their order."""

    def __init__(self, change: Callable[[Change], Changed], names: Callable[[str], Sequence[str]]) -> None:
        self._change, self._names = change, names

    def follow(self, old: PoolSizes, new: PoolSizes) -> None:
        """Raises AfserveError where something of it cannot be; what was done before that stays."""
        count, now = old.turns(new), old.turned(new)
        self._turn(count, "prefill", "decode")
        self._turn(-count, "decode", "prefill")
        if now != new:
            self._scale(now, new)

    def _turn(self, count: int, pool: str, other: str) -> None:
        """Those with the highest numbers, which would go else."""
        if count > 0:
            for node in self._names(pool)[-count:]:
                self._change(NewPhase(node, other))

    def _scale(self, now: PoolSizes, new: PoolSizes) -> None:
        before, after = pool_names(now), pool_names(new)
        wanted = {pool: str(count) for pool, count in after.items() if count != before.get(pool)}
        try:
            self._change(ScaleTo(wanted))
        except DoesNotFitError:
            pairs = _exchanges(before, after)
            if not pairs:
                raise
            for going, coming in pairs:
                self._exchange(going, coming)

    def _exchange(self, going: str, coming: str) -> None:
        changed = self._change(NewRole(self._names(going)[-1], _ROLES[coming]))
        if coming in PHASE_POOLS:
            for node in changed.coming:
                self._change(NewPhase(node, coming))


def _exchanges(before: dict[str, int], after: dict[str, int]) -> list[tuple[str, str]]:
    """(pool of a node that goes, pool of the one that comes in its place), of different roles."""
    less = [pool for pool in after for _ in range(before[pool] - after[pool])]
    more = [pool for pool in after for _ in range(after[pool] - before[pool])]
    return [(one, other) for one, other in zip(less, more, strict=False) if _ROLES[one] is not _ROLES[other]]
