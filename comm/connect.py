"""Opens a transport by kind and address: the one place that knows which transports there are.

An expert node listens and gets an address, a plain string that travels over the control plane; an attention node
connects to the addresses of all expert nodes, in the order of their index.
"""

import sys
from collections.abc import Sequence

import torch

from afserve import member
from afserve.comm.transport import HOST, Layout, Transport
from afserve.comm.transports import local, shm, tcp
from afserve.errors import ConfigError, RendezvousError


def kinds() -> tuple[str, ...]:
    """The transports that work on this machine."""
    found = ["local", "shm", "tcp"] if sys.platform == "linux" else ["local", "tcp"]
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        found.append("dist")
    if torch.cuda.is_available():
        found.append("symm")
    return tuple(found)


def listen(
    kind: str,
    *,
    expert: int,
    attention_nodes: int,
    layout: Layout,
    host: str = "127.0.0.1",
    device: torch.device = HOST,
) -> tuple[Transport, str]:
    """The expert node's end and its address. `attention_nodes` is how many may ever connect.

    `host` is the one address that `tcp`, `dist` and `symm` listen on; the others need none. `device` is where payloads
    of `dist`, `symm` and `local` lie; the others have theirs in host memory.
    """
    _check(kind)
    if kind == "tcp":
        return tcp.listen(expert, attention_nodes, layout, host)
    if kind == "dist":
        from afserve.comm.transports import dist  # a PyTorch without gloo cannot import it
        from afserve.comm.transports.pair_stream import Carriage

        return dist.listen(expert, attention_nodes, layout, host, Carriage(device))
    if kind == "symm":
        from afserve.comm.transports import symm

        return symm.listen(expert, attention_nodes, layout, host, device)
    if kind == "shm":
        return shm.listen(expert, attention_nodes, layout)
    return local.listen(expert, attention_nodes, layout, device)


def connect(
    addresses: Sequence[str],
    *,
    attention: int,
    layout: Layout,
    timeout: float,
    device: torch.device = HOST,
) -> Transport:
    """The attention node's end. Raises RendezvousError naming the expert node and what is wrong with it."""
    if not addresses:
        raise RendezvousError(f"{member.attention_node(attention)}: there is no expert node to connect to")
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
        from afserve.comm.transports import dist
        from afserve.comm.transports.pair_stream import Carriage

        return dist.connect(addresses, attention, layout, timeout, Carriage(device))
    if kind == "symm":
        from afserve.comm.transports import symm

        return symm.connect(addresses, attention, layout, timeout, device)
    return local.connect(addresses, attention, layout)


def _check(kind: str) -> None:
    if kind == "symm" and kind not in kinds():
        raise ConfigError(
            "transport: symm is for GPUs of one NVLink domain, and this machine has no CUDA device that PyTorch "
            f"{torch.__version__} can use; here are {', '.join(kinds())}",
            param="transport",
        )
    if kind not in kinds():
        raise ConfigError(
            f"transport: {kind!r} is not one of {', '.join(kinds())} on this machine", param="transport"
        )
