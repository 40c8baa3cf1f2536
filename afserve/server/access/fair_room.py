"""How keys share a bounded store: none can fill it, so there is room for whoever comes, without a share per key to set.

What cannot be taken away again follows the dynamic thresholds of shared switch memories (Choudhury and Hahne, 1998): a
key may hold as much as is free. One alone may have half, a second one then a quarter, n that came together 1/(n+1)
each. What may be evicted goes from whoever has most. Who has no name, as where no key is asked for, has all.
"""

from collections.abc import Iterable


def has_room(owner: str, own: float, held: float, size: float, most: float) -> bool:
    """Whether `owner`, who holds `own` of the `held`, may have `size` more where there is room for `most`."""
    free = most - held - size
    return free >= (own + size if owner else 0)


def most_held(sizes: Iterable[tuple[str, float]]) -> str:
    """The owner with most of what there is; of equals the first by name."""
    held: dict[str, float] = {}
    for owner, size in sizes:
        held[owner] = held.get(owner, 0) + size
    return min(held, key=lambda owner: (-held[owner], owner))
