"""How a node begins: it tells what its host has, meets its peers, and sets aside what stays as long as its process.

Both roles begin like this; what they do then is in `attention.py` and `expert.py`.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from afserve.control.node.spans import NodeSpans
from afserve.control.node.stream import ControlStream
from afserve.control.wire.values import Assigned, Endpoint, Identity, Noted, Peers

PEERS_SECONDS = 330.0  # longer than the controller waits for anyone: it knows who is missing


def spans_of(assigned: Assigned) -> NodeSpans | None:
    """Where the node's spans go; None without a collector."""
    endpoint = assigned.deployment.otlp_endpoint
    return NodeSpans(endpoint, str(assigned.node)) if endpoint else None


def identify(stream: ControlStream) -> Callable[[Mapping[str, str]], None]:
    """Tells what this node's host has of the checkpoint."""
    return lambda things: stream.send(Identity(things))


class _Noting(logging.Handler):
    def __init__(self, send: Callable[[Noted], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(Noted(record.getMessage(), warning=True))


@contextmanager
def noting(send: Callable[[Noted], None]) -> Iterator[None]:
    """Inside it, what the data plane warns of (who was turned away, at a bounded rate) is a line of the run's log."""
    handler, log = _Noting(send), logging.getLogger("afserve.comm")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def meet(stream: ControlStream, address: str) -> Callable[[dict[str, str]], Peers]:
    """Tells what this node will put on the data plane and where its KV blocks are, and returns the expert nodes to
    begin with."""

    def rendezvous(agreed: dict[str, str]) -> Peers:
        stream.send(Endpoint(address, agreed))
        peers = stream.expect(Peers, PEERS_SECONDS, "the expert nodes' addresses")
        assert isinstance(peers, Peers)
        return peers

    return rendezvous


def freeze_heap() -> None:
    """Weights and tables live as long as the process; the collector need not look at them again."""
    gc.collect()
    gc.freeze()
