"""How nodes use the cores of a machine: threads, micro-batches, and whether two of them lend each other theirs.

`picked` gets a reason for each choice.
"""

from collections.abc import Sequence

from afserve.comm.binding import Binding
from afserve.config import MAX_MICRO_BATCHES, THREADS
from afserve.errors import ConfigError
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.wishes import Share, Wishes
from afserve.settings import in_range


def micro_batches_of(wishes: Wishes, nodes: Share, picked: dict[str, str]) -> int | None:
    """None leaves it to each attention node, which measures."""
    text = wishes.micro_batches
    if text != "auto":
        if not text.isdigit():
            raise ConfigError(f"--micro-batches: {text!r} is neither a number nor auto")
        in_range("--micro-batches", int(text), 1, MAX_MICRO_BATCHES)
        return int(text)
    if not nodes.experts:
        picked["micro-batches"] = "1, nothing to overlap in one process"
        return 1
    picked["micro-batches"] = f"1 to {MAX_MICRO_BATCHES}, by measured speed"
    return None


def threads_of(
    machine: Machine, wishes: Wishes, nodes: Share, seats: Sequence[Binding], picked: dict[str, str]
) -> int:
    """`seats` are the NUMA nodes that the nodes are dealt to evenly; none if they may run anywhere."""
    if wishes.threads is not None:
        in_range("--threads", wishes.threads, THREADS.low, THREADS.high)
        return wishes.threads
    most = max(share.total for share in wishes.hosts or (nodes,))
    share = machine.cores // most
    if seats:
        share = min(share, min(len(seat.cores) for seat in seats) * len(seats) // most)
    threads = max(1, share)
    picked["threads"] = f"{threads} per node, {cores_in_words(machine)} for {most} node{'s' * (most > 1)}"
    return threads


def shares_cores(
    machine: Machine, wishes: Wishes, nodes: Share, threads: int, picked: dict[str, str]
) -> bool:
    """Unless the user says: where one thread of each of two nodes is all that this machine has cores for.

    On a single core there is nobody to help, and with more cores a node that waits keeps none from the other.
    """
    asked = wishes.engine.share_cores
    pair = (nodes.attention, nodes.experts, threads) == (1, 1, 1)
    here = not wishes.hosts and wishes.engine.device == wishes.experts_on == "cpu"
    if asked is not None:
        if asked and not (pair and here):
            picked["share-cores"] = "asked for, but only between two nodes of one thread each on this host"
        return asked
    if not (pair and here and nodes.total <= machine.cores < 2 * nodes.total):
        return False
    picked["share-cores"] = (
        f"whoever waits lends its core, {cores_in_words(machine)} for two nodes of one thread"
    )
    return True


def cores_in_words(machine: Machine) -> str:
    return f"{machine.cores} core{'s' * (machine.cores > 1)}"
