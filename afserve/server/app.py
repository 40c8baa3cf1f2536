"""The HTTP application: which path is answered by whom. Serving it on a socket is in `serve`."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from afserve.chat_template import ChatTemplate
from afserve.errors import AfserveError
from afserve.server.admin import Admin
from afserve.server.backend import Backend
from afserve.server.body import Bodies
from afserve.server.gate import Gate
from afserve.server.generate import Generate
from afserve.server.generation import Generator
from afserve.server.inflight import Counted, Inflight
from afserve.server.info import Info
from afserve.server.live import Live
from afserve.server.observe import ServerMetrics
from afserve.server.refusal import on_afserve_error, on_bug, on_http_exception
from afserve.server.sampling import model_defaults
from afserve.server.service import Service
from afserve.server.settings import ServerSettings
from afserve.server.text_worker import TextWorker
from afserve.tokenizer import Tokenizer

__all__ = ["build_app"]


def build_app(backend: Backend, tokenizer: Tokenizer, settings: ServerSettings) -> Starlette:
    """An ASGI app; `app.state.service` is its Service. The chat template is read from the model's folder."""
    metrics = ServerMetrics()
    service = Service(
        backend=backend,
        tokenizer=tokenizer,
        template=ChatTemplate.from_folder(backend.model.path),
        settings=settings,
        metrics=metrics,
        inflight=Inflight(settings.max_inflight),
        bodies=Bodies(settings.max_body_bytes, settings.read_deadline),
        worker=TextWorker(deadline=settings.text_deadline),
        generator=Generator(backend, tokenizer, metrics),
        defaults=model_defaults(backend.model.path),
    )
    app = Starlette(
        routes=_routes(service),
        middleware=[Middleware(Gate, settings=settings, metrics=metrics)],
        exception_handlers={
            AfserveError: on_afserve_error,
            HTTPException: on_http_exception,
            Exception: on_bug,
        },
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _routes(service: Service) -> list[Route]:
    generate, info, admin = Generate(service), Info(service), Admin(service)
    completions = Counted(service.inflight, generate.completions)
    chat = Counted(service.inflight, generate.chat)
    return [
        Route("/", Live().page, methods=["GET"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", info.models, methods=["GET"]),
        Route("/v1/models/{name:path}", info.model, methods=["GET"]),
        Route("/tokenize", info.tokenize, methods=["POST"]),
        Route("/detokenize", info.detokenize, methods=["POST"]),
        Route("/health", info.health, methods=["GET"]),
        Route("/ready", info.ready, methods=["GET"]),
        Route("/version", info.version, methods=["GET"]),
        Route("/metrics", info.metrics, methods=["GET"]),
        Route("/status", info.status, methods=["GET"]),
        Route("/admin/placement", admin.placement, methods=["GET"]),
        Route("/admin/placement", admin.apply, methods=["POST"]),
        Route("/admin/routing/start", admin.start, methods=["POST"]),
        Route("/admin/routing/stop", admin.stop, methods=["POST"]),
        Route("/admin/routing/dump", admin.dump, methods=["GET"]),
    ]
