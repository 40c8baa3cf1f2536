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

_ROLES = {**dict.fromkeys(("prefill", "decode", "attention"), Role.ATTENTION), "experts": Role.EXPERT}


class PoolChanges:
    """`change` does as people ask, `names` are those of the nodes of a pool that stay, in their order."""

    def __init__(self, change: Callable[[Change], Changed], names: Callable[[str], Sequence[str]]) -> None:
        self._ask, self._names = change, names
        self.changed = 0  # that were done of the last advice

    def _change(self, change: Change) -> Changed:
        done = self._ask(change)
        self.changed += 1
        return done

    def follow(self, old: PoolSizes, new: PoolSizes) -> None:
        """Raises AfserveError where something of it cannot be; what was done before that stays, and `changed` counts
        it."""
        self.changed = 0
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
    """(pool of a node that goes, pool of the one that comes in its place), of different roles. Pools may have other
    names before than after: attention nodes that do both become those that read prompts and those that decode."""
    less, more = _beyond(before, after), _beyond(after, before)
    return [
        pair
        for role, other in ((Role.ATTENTION, Role.EXPERT), (Role.EXPERT, Role.ATTENTION))
        for pair in zip(
            less[role][: max(len(less[role]) - len(more[role]), 0)],
            more[other][: max(len(more[other]) - len(less[other]), 0)],
            strict=False,
        )
    ]


def _beyond(one: dict[str, int], other: dict[str, int]) -> dict[Role, list[str]]:
    """By role, the pool of each node that one has and the other has not."""
    found: dict[Role, list[str]] = {Role.ATTENTION: [], Role.EXPERT: []}
    for pool, count in one.items():
        found[_ROLES[pool]] += [pool] * (count - other.get(pool, 0))
    return found
