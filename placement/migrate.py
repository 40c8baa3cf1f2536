"""How to get from one placement to another while both are being used: stages that only ever fill free slots.

Pure: placements in, placements out. Between two stages every attention node has switched, so a slot that the
earlier stage no longer names is free for the next. Interrupted after any stage, what is in force is valid.
"""

from collections.abc import Iterator, Sequence

from afserve.errors import ConfigError
from afserve.placement.placement import FREE, Fill, LayerPlacement, Placement

Node = list[int]


def fills(old: Placement, new: Placement) -> tuple[Fill, ...]:
    """What has to be loaded before `new` may be used. Raises ConfigError where it would overwrite a slot in use."""
    found = old.diff(new).fills
    for fill in found:
        if fill.replaced != FREE:
            raise ConfigError(
                f"epoch {new.epoch}: layer {fill.layer}, node {fill.node}, slot {fill.slot} still holds expert "
                f"{fill.replaced} in epoch {old.epoch}; it cannot take expert {fill.expert} yet"
            )
    return found


class SlotUse:
    """What one expert node's slots hold, and which epochs may still be routed to them.

    A fill may have been given up: its slots hold what nobody asked for, which does no harm and is overwritten by the
    next one that needs them.
    """

    def __init__(self, node: int, placement: Placement) -> None:
        self._node = node
        self._slots: dict[tuple[int, int], int] = {}
        self._used: dict[int, dict[tuple[int, int], int]] = {}
        self.fills(placement)

    def fills(self, placement: Placement) -> tuple[Fill, ...]:
        """What has to be loaded for `placement`; from now on its slots are in use, until `retire`.

        Raises ConfigError where an epoch that has not been retired needs a slot for another expert.
        """
        wanted = self._wanted(placement)
        for epoch, used in self._used.items():
            for (layer, slot), expert in wanted.items():
                other = used.get((layer, slot), expert)
                if other != expert:
                    raise ConfigError(
                        f"epoch {placement.epoch}: layer {layer}, node {self._node}, slot {slot} still holds expert "
                        f"{other} in epoch {epoch}; it cannot take expert {expert} yet"
                    )
        found = [
            Fill(layer=layer, node=self._node, slot=slot, expert=expert, replaced=self._slots.get(key, FREE))
            for key, expert in wanted.items()
            if self._slots.get(key) != expert
            for layer, slot in (key,)
        ]
        self._slots.update(wanted)
        self._used[placement.epoch] = wanted
        return tuple(found)

    def forget(self, fills: Sequence[Fill]) -> None:
        """These were given up before they were done: their slots hold what `replaced` says."""
        for fill in fills:
            self._slots[fill.layer, fill.slot] = fill.replaced

    def retire(self, epoch: int) -> None:
        """Nothing routed under `epoch` will come any more, or it was given up before anything was."""
        self._used.pop(epoch, None)

    def _wanted(self, placement: Placement) -> dict[tuple[int, int], int]:
        if self._node >= placement.nodes:
            return {}
        return {(layer, slot): expert for layer, slot, expert in placement.held(self._node)}


def stages(old: Placement, target: Placement, slots: int) -> Iterator[Placement]:
    """Placements from `old` to `target`'s replicas, each one epoch on, each filling only slots free in the one before.

    `slots` are the physical slots per node and layer; at least one must be free on a node for anything to change
    there. Of `target` its nodes, experts and shares are kept; slot numbers only where one stage suffices. Raises
    ConfigError where the way there is blocked.
    """
    _check(old, target, slots)
    if _at_once(old, target, slots):
        yield target.with_epoch(old.epoch + 1)
        return
    current, epoch = old, old.epoch
    while True:
        layers = tuple(
            _next(now, goal, slots) for now, goal in zip(current.layers, target.layers, strict=True)
        )
        if all(_same(was, will) for was, will in zip(current.layers, layers, strict=True)):
            _check_arrived(current, target)
            return
        epoch += 1
        current = Placement(epoch, old.nodes, old.experts, layers)
        yield current


def _at_once(old: Placement, target: Placement, slots: int) -> bool:
    """Whether the target needs nothing but free slots; so it is when a node is lost. `_same` has no stage."""
    if not old.slots_per_node() == target.slots_per_node() <= slots:
        return False
    was, will = old.slot_array(), target.slot_array()
    taken = (was != FREE) & (will != FREE) & (was != will)
    return not taken.any() and bool((was != will).any())


def _next(now: LayerPlacement, goal: LayerPlacement, slots: int) -> LayerPlacement:
    """Fill what fits into free slots, then stop using everything that the goal does not want and others can take."""
    held = [list(row) + [FREE] * (slots - len(row)) for row in now.slots]
    old = [[expert for expert in row if expert != FREE] for row in held]
    wanted = [{expert for expert in row if expert != FREE} for row in goal.slots]
    for node, row in enumerate(held):
        missing = sorted(wanted[node].difference(row))
        for slot in (i for i, expert in enumerate(row) if expert == FREE):
            if missing:
                row[slot] = missing.pop(0)
    copies = _count(held)
    for node, row in enumerate(held):
        # Only what the last stage used may go; it stays readable until everyone has switched.
        for slot, expert in enumerate(row):
            if expert in old[node] and expert not in wanted[node] and copies[expert] > 1:
                copies[expert] -= 1
                row[slot] = FREE
    return LayerPlacement(tuple(tuple(row) for row in held), _shares(held, goal))


def _same(one: LayerPlacement, other: LayerPlacement) -> bool:
    """Whether both name the same replicas with the same shares; unused slots at a row's end do not matter."""

    def used(layer: LayerPlacement) -> list[tuple[int, int, int, float]]:
        rows = enumerate(zip(layer.slots, layer.share, strict=True))
        return [
            (node, slot, expert, round(share, 9))
            for node, (row, shares) in rows
            for slot, (expert, share) in enumerate(zip(row, shares, strict=True))
            if expert != FREE
        ]

    return used(one) == used(other)


def _count(held: Sequence[Node]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for row in held:
        for expert in row:
            if expert != FREE:
                counts[expert] = counts.get(expert, 0) + 1
    return counts


def _shares(held: Sequence[Node], goal: LayerPlacement) -> tuple[tuple[float, ...], ...]:
    """The goal's share for replicas it wants; what is missing of an expert goes to its copies here, evenly."""
    aim = [dict(zip(row, share, strict=True)) for row, share in zip(goal.slots, goal.share, strict=True)]
    share = [[0.0 if e == FREE else aim[node].get(e, 0.0) for e in row] for node, row in enumerate(held)]
    places: dict[int, list[tuple[int, int]]] = {}
    for node, row in enumerate(held):
        for slot, expert in enumerate(row):
            if expert != FREE:
                places.setdefault(expert, []).append((node, slot))
    for found in places.values():
        total = sum(share[n][s] for n, s in found)
        for n, s in found:
            share[n][s] = share[n][s] / total if total > 0 else 1.0 / len(found)
    return tuple(tuple(row) for row in share)


def _check_arrived(last: Placement, target: Placement) -> None:
    for number, (layer, goal) in enumerate(zip(last.layers, target.layers, strict=True)):
        for node, (row, wanted) in enumerate(zip(layer.slots, goal.slots, strict=True)):
            missing = sorted(set(wanted) - set(row) - {FREE})
            if missing:
                raise ConfigError(
                    f"layer {number}, node {node}: no slot comes free for expert {missing[0]}; leave one slot of "
                    "each node empty, or start with more --redundant-experts"
                )


def _check(old: Placement, target: Placement, slots: int) -> None:
    if (old.nodes, old.experts, len(old.layers)) != (target.nodes, target.experts, len(target.layers)):
        raise ConfigError(
            f"a placement of {target.nodes} nodes, {target.experts} experts, {len(target.layers)} layers cannot "
            f"follow one of {old.nodes}, {old.experts}, {len(old.layers)}"
        )
    widest = target.most_held()
    if widest > slots:
        raise ConfigError(f"the placement needs {widest} slots on a node, there are {slots}")
