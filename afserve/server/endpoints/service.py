"""What every endpoint is given: the models, the text side, the limits and the counts of one gateway."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from afserve.control.admission import Objectives
from afserve.engine.scheduling.request import Tenant
from afserve.errors import CapacityError
from afserve.server.access.accounts import Account, Accounts
from afserve.server.answers.answering import Answering, DrainingError
from afserve.server.answers.hosted import Hosted, Models
from afserve.server.answers.resumables import Resumables
from afserve.server.bodies.declared import Scheduling
from afserve.server.http.body import Bodies
from afserve.server.http.connections import Connections
from afserve.server.http.settings import ServerSettings
from afserve.server.metrics.observe import HttpMetrics
from afserve.server.metrics.spans import Spans
from afserve.server.replies.ignored import Ignored
from afserve.server.state.database import Database
from afserve.server.text.text_pool import TextPool


@dataclass(frozen=True, slots=True)
class Service:
    """`at_start` is called before the first connection, `at_end` when the server stops, before it waits."""

    models: Models
    settings: ServerSettings
    http: HttpMetrics
    answering: Answering
    bodies: Bodies
    text: TextPool
    connections: Connections
    resumables: Resumables
    database: Database
    accounts: Accounts
    spans: Spans
    ignored: Ignored = field(default_factory=Ignored)
    at_start: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    at_end: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    def check_ready(self, *models: Hosted) -> None:
        """Whether a request to any of these would be answered at once."""
        if self.answering.draining:
            raise DrainingError
        for each in models:
            each.backend.check()
            if not each.backend.ready():
                which = f"{each.model_name}: " if len(self.models) > 1 else ""
                raise CapacityError(
                    f"{which}not ready: nodes are starting, stopping or lost; try again when /ready answers 200"
                )

    def check_serving(self) -> None:
        """Raises why no new request is taken, whatever its model."""
        if self.answering.draining:
            raise DrainingError
        self.models.check_any_serves()

    def serving(self, name: str) -> Hosted:
        """The model of a request. Raises why it takes no new ones."""
        found = self.models.named(name)
        found.backend.check()
        return found

    def scheduled(self, account: Account, asked: Scheduling) -> Scheduling:
        """As this account's, with the first token when this server wants it where the request does not say."""
        scheduling = account.scheduled(asked)
        return replace(scheduling, ttft=scheduling.ttft or self.settings.ttft or None)

    def check_objectives(self, model: Hosted, prompts: Sequence[Sequence[int]], asked: Scheduling) -> None:
        """Raises OverloadedError where the answer is predicted to come too late for what the request, or this server,
        asks for."""
        own = self.settings
        ttft, tpot = asked.ttft or own.ttft or None, asked.tpot or own.tpot or None
        wanted = Objectives(ttft, tpot, asked.deadline, Tenant(asked.tenant, asked.share), asked.cache_salt)
        model.backend.admit(prompts, wanted)
