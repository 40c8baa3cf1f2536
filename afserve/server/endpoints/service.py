"""What every endpoint is given: the models, the text side, the limits and the counts of one gateway."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from afserve.control.admission import Objectives
from afserve.engine.scheduling.request import Tenant
from afserve.errors import CapacityError
from afserve.server.access.accounts import Account, Accounts
from afserve.server.answers.answer import Answer, Keep
from afserve.server.answers.answering import Answering, DrainingError
from afserve.server.answers.generation import Task, generate
from afserve.server.answers.hosted import Hosted, Models
from afserve.server.answers.resumables import Resumables
from afserve.server.bodies.declared import Scheduling
from afserve.server.bodies.prepared import Prepared
from afserve.server.http.audit_log import AuditLog
from afserve.server.http.body import Bodies
from afserve.server.http.connections import Connections
from afserve.server.http.settings import ServerSettings
from afserve.server.metrics.observe import HttpMetrics
from afserve.server.metrics.spans import Spans
from afserve.server.replies.ignored import Ignored
from afserve.server.replies.surface import Surface
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
    audit: AuditLog | None = None
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

    def scheduled(self, account: Account, asked: Scheduling) -> Scheduling:
        """As this account's, with the first token when this server wants it where the request does not say."""
        scheduling = account.scheduled(asked)
        return replace(scheduling, ttft=scheduling.ttft or self.settings.ttft or None)

    def admitted(self, asked: Prepared, scheduling: Scheduling) -> tuple[Hosted, Prepared]:
        """The model of a request, which is scheduled so.

        Raises why the model takes no new ones, and OverloadedError where the answer is predicted to come too late for
        what the request, or this server, asks for.
        """
        model, own = self.models.named(asked.model), self.settings
        model.backend.check()
        ttft, tpot = scheduling.ttft or own.ttft or None, scheduling.tpot or own.tpot or None
        tenant = Tenant(scheduling.tenant, scheduling.share)
        if not scheduling.refuses_late:
            ttft = tpot = None
        wanted = Objectives(ttft, tpot, scheduling.deadline, tenant, scheduling.cache_salt)
        model.backend.admit(asked.prompts, wanted)
        return model, model.as_generated(replace(asked, scheduling=scheduling))

    def answer_now(self, model: Hosted, task: Task, surface: Surface, keep: Keep | None = None) -> Answer:
        """Of a request that ends with its connection, computed while the client reads."""
        asked = task.asked
        return Answer(
            lambda writer: generate(model, task, writer),
            self.answering,
            task,
            surface,
            asked.stream is not None,
            self.settings,
            deadline=asked.scheduling.deadline,
            keep=keep,
        )
