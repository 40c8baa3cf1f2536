"""Opens a transport by kind and address: the table `TRANSPORTS` is the one place that knows which transports there are.

An expert node listens and gets an address, a string `KIND:...` that travels over the control plane. An attention node
connects to the addresses of all expert nodes, by their index. A new transport is a file and a row here
(docs/add-a-transport.md).
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from afserve import member
from afserve.comm.transport import HOST, Connecting, Layout, ListenSpec, Transport
from afserve.comm.transports import local, pairs, shm, tcp
from afserve.credentials import NOBODYS, Credentials
from afserve.errors import ConfigError, RendezvousError
from afserve.kernels.devices.cuda import count_gpus


@dataclass(frozen=True, slots=True)
class Opening:
    """A row of the table: how either end is opened, and whether that works on this machine."""

    listen: Callable[[ListenSpec], tuple[Transport, str]]
    connect: Callable[[Connecting], Transport]
    works: Callable[[], bool] = lambda: True


def _has_gloo() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def _of_file(name: str, works: Callable[[], bool]) -> Opening:
    """Of a file that is imported when it is needed: a PyTorch without gloo cannot import it."""

    def file() -> Any:
        return import_module(f"afserve.comm.transports.{name}")

    return Opening(lambda at: file().listen(at), lambda to: file().connect(to), works)


TRANSPORTS: dict[str, Opening] = {
    "local": Opening(local.listen, local.connect),
    "shm": Opening(shm.listen, shm.connect, lambda: sys.platform == "linux"),
    "tcp": Opening(tcp.listen, tcp.connect),
    "pairs": Opening(pairs.listen, pairs.connect, lambda: sys.platform == "linux"),
    "dist": _of_file("dist", _has_gloo),
    "symm": _of_file("symm", lambda: count_gpus() > 0),
}


def kinds() -> tuple[str, ...]:
    """The transports that work on this machine."""
    return tuple(kind for kind, opening in TRANSPORTS.items() if opening.works())


def listen(
    kind: str,
    *,
    expert: int,
    attention_nodes: int,
    layout: Layout,
    host: str = "127.0.0.1",
    device: torch.device = HOST,
    credentials: Credentials = NOBODYS,
) -> tuple[Transport, str]:
    """The expert node's end and its address. `attention_nodes` is how many may ever connect.

    `host` is the one address that `tcp`, `dist` and `symm` listen on; the others need none. `device` is where payloads
    of `dist`, `symm` and `local` lie; the others have theirs in host memory. Who connects to
    `tcp`, `pairs`, `dist` or `symm` has to have the token of `credentials`; with certificates, `tcp` is encrypted.
    """
    return _opening(kind).listen(ListenSpec(expert, attention_nodes, layout, host, device, credentials))


def connect(
    addresses: Sequence[str] | Mapping[int, str],
    *,
    attention: int,
    layout: Layout,
    timeout: float,
    device: torch.device = HOST,
    credentials: Credentials = NOBODYS,
) -> Transport:
    """The attention node's end, by the expert nodes' indices or in their order; others may be dialled later.

    Raises RendezvousError naming the expert node and what is wrong with it.
    """
    if not addresses:
        raise RendezvousError(f"{member.attention_node(attention)}: there is no expert node to connect to")
    known = dict(addresses) if isinstance(addresses, Mapping) else dict(enumerate(addresses))
    found = {address.partition(":")[0].partition("+")[0] for address in known.values()}
    if len(found) > 1:
        raise RendezvousError(f"expert nodes listen on different transports: {', '.join(sorted(found))}")
    return _opening(found.pop()).connect(Connecting(known, attention, layout, timeout, device, credentials))


def _opening(kind: str) -> Opening:
    """The row of `kind`. Raises ConfigError when it is unknown or does not work on this machine."""
    opening = TRANSPORTS.get(kind)
    if opening is not None and opening.works():
        return opening
    if kind == "symm":
        raise ConfigError(
            "transport: symm is for GPUs of one host, and this machine has no CUDA device that PyTorch "
            f"{torch.__version__} can use; here are {', '.join(kinds())}",
            param="transport",
        )
    raise ConfigError(
        f"transport: {kind!r} is not one of {', '.join(kinds())} on this machine", param="transport"
    )
