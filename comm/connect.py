"""Opens a transport by kind and address: the one place that knows which transports there are.

An expert node listens and gets an address, a plain string that travels over the control plane; an attention node
connects to the addresses of all expert nodes, in the order of their index.
"""

import sys
from collections.abc import Sequence

import torch

from afserve.comm import local, shm, tcp
from afserve.comm.transport import Layout, Transport
from afserve.errors import ConfigError, RendezvousError


def kinds() -> tuple[str, ...]:
    """The transports that work on this machine."""
    between_hosts = (
        ("dist",) if torch.distributed.is_available() and torch.distributed.is_gloo_available() else ()
    )
    return (
        ("local", "shm", "tcp", *between_hosts)
        if sys.platform == "linux"
        else ("local", "tcp", *between_hosts)
    )


def listen(
    kind: str, *, expert: int, attention_nodes: int, layout: Layout, host: str = "127.0.0.1"
) -> tuple[Transport, str]:
    """The expert node's end and its address. `attention_nodes` is how many may ever connect.

    `host` is the one address that `tcp` and `dist` listen on; the others need none.
    """
    _check(kind)
    if kind == "tcp":
        return tcp.listen(expert, attention_nodes, layout, host)
    if kind == "dist":
        from afserve.comm import dist  # a PyTorch without gloo cannot import it

        return dist.listen(expert, attention_nodes, layout, host)
    if kind == "shm":
        return shm.listen(expert, attention_nodes, layout)
    return local.listen(expert, attention_nodes, layout)


def connect(addresses: Sequence[str], *, attention: int, layout: Layout, timeout: float) -> Transport:
    """The attention node's end. Raises RendezvousError naming the expert node and what is wrong with it."""
    if not addresses:
        raise RendezvousError(f"attention-{attention}: there is no expert node to connect to")
    found = {address.partition(":")[0] for address in addresses}
    if len(found) > 1:
        raise RendezvousError(f"expert nodes listen on different transports: {', '.join(sorted(found))}")
    kind = found.pop()
    _check(kind)
    if kind == "shm":
        return shm.connect(addresses, attention, layout, timeout)
    if kind == "tcp":
        return tcp.connect(addresses, attention, layout, timeout)
    if kind == "dist":
        from afserve.comm import dist

        return dist.connect(addresses, attention, layout, timeout)
    return local.connect(addresses, attention, layout)


def _check(kind: str) -> None:
    if kind not in kinds():
        raise ConfigError(
            f"transport: {kind!r} is not one of {', '.join(kinds())} on this machine", param="transport"
        )
