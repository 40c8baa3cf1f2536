"""What every endpoint is given: the backend, the text side, the limits and the counts of one gateway."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from afserve.control.backend import Backend
from afserve.errors import CapacityError
from afserve.server.access.accounts import Accounts
from afserve.server.body import Bodies
from afserve.server.connections import Connections
from afserve.server.generation import Generator
from afserve.server.inflight import DrainingError, Inflight
from afserve.server.observe import ServerMetrics
from afserve.server.resumables import Resumables
from afserve.server.settings import ServerSettings
from afserve.server.spans import Spans
from afserve.server.state.database import Database
from afserve.server.text_pool import TextPool
from afserve.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Service:
    """`at_start` is called before the first connection, `at_end` when the server stops, before it waits."""

    backend: Backend
    tokenizer: Tokenizer
    settings: ServerSettings
    metrics: ServerMetrics
    inflight: Inflight
    bodies: Bodies
    text: TextPool
    connections: Connections
    generator: Generator
    resumables: Resumables
    database: Database
    accounts: Accounts
    spans: Spans
    at_start: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    at_end: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    def check_ready(self) -> None:
        """Whether a request would be answered at once."""
        self.check()
        if not self.backend.ready():
            raise CapacityError(
                "not ready: nodes are starting, stopping or lost; try again when /ready answers 200"
            )

    def check(self) -> None:
        """Raises why new requests are not taken."""
        if self.inflight.draining:
            raise DrainingError
        self.backend.check()
