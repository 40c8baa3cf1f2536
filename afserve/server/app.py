"""The HTTP application: which path is answered by whom. Serving it on a socket is in `serve`."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from afserve.control.backend import Backend, ServedModel
from afserve.control.wire.change_values import VERBS
from afserve.errors import AfserveError
from afserve.server.access.accounts import Accounts
from afserve.server.access.keyring import Keyring
from afserve.server.answers.answering import Answering
from afserve.server.answers.hosted import Hosted, Models
from afserve.server.answers.resumables import Resumables
from afserve.server.batches.endpoints import Batches, Files
from afserve.server.bodies.sampling import model_defaults
from afserve.server.endpoints.admin import Admin
from afserve.server.endpoints.embeddings import EmbeddingsEndpoint, ollama_vector, ollama_vectors
from afserve.server.endpoints.generate import Generate
from afserve.server.endpoints.info import Info
from afserve.server.endpoints.ollama_models import OllamaModels
from afserve.server.endpoints.requests import Again, RequestEndpoints
from afserve.server.endpoints.service import Service
from afserve.server.endpoints.surfaces import Responses, Spoken, message, ollama_chat, ollama_generate
from afserve.server.gate import LOCAL_ORIGIN, Gate
from afserve.server.http.body import Bodies
from afserve.server.http.connections import Connections
from afserve.server.http.settings import ServerSettings
from afserve.server.live.feed import Feeds
from afserve.server.live.page import PREFIX, Page
from afserve.server.metrics.goodput import Times
from afserve.server.metrics.observe import HttpMetrics
from afserve.server.metrics.spans import Spans
from afserve.server.openapi.document import described
from afserve.server.replies.ignored import HEADER
from afserve.server.replies.refusal import on_afserve_error, on_bug, on_http_exception
from afserve.server.state.database import Database
from afserve.server.text.prepare import BodyKind, Preparer
from afserve.server.text.preparers import Preparers
from afserve.server.text.prompt_tokens import TextModel
from afserve.server.text.text_pool import TextPool
from afserve.tokens.tokenizer import Tokenizer

__all__ = ["build_app"]
_EMBED = BodyKind.OLLAMA_EMBED


def build_app(models: Sequence[tuple[Backend, Tokenizer]], settings: ServerSettings) -> Starlette:
    """An ASGI app; `app.state.service` is its Service. Text processes read the models' folders when they start."""
    http = HttpMetrics()
    times = Times(settings.ttft or None, settings.tpot or None)
    hosted = Models(
        [Hosted.over_backend(backend, tokenizer, http.clock, times) for backend, tokenizer in models]
    )
    database = Database(settings.state_dir)
    ring = Keyring(settings.api_keys, settings.admin_keys, settings.keys_file)
    accounts = Accounts(ring, database, shares_prefixes=settings.share_prefixes)
    service = Service(
        models=hosted,
        settings=settings,
        http=http,
        answering=Answering(settings.max_inflight),
        bodies=Bodies(settings.max_body_bytes, settings.read_deadline),
        text=_text_pool(hosted, settings),
        connections=Connections(settings.max_connections, settings.max_connections_per_client),
        resumables=Resumables(hosted, settings, accounts),
        database=database,
        accounts=accounts,
        spans=Spans(settings.otlp_endpoint or ""),
    )
    routes = _routes(service)
    app = Starlette(
        routes=[*routes, *described(routes)],
        middleware=[
            *_cors(settings),
            Middleware(
                Gate,
                settings=settings,
                metrics=http,
                connections=service.connections,
                accounts=accounts,
                spans=service.spans,
            ),
        ],
        exception_handlers={
            AfserveError: on_afserve_error,
            HTTPException: on_http_exception,
            Exception: on_bug,
        },
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _text_pool(models: Models, settings: ServerSettings) -> TextPool:
    texts = [_text_model(each.backend.model, settings) for each in models]
    preparers = [
        Preparer(text, each.tokenizer, model_defaults(text.folder), elsewhere=True)
        for text, each in zip(texts, models, strict=True)
    ]
    return TextPool(Preparers(preparers), texts, settings)


def _text_model(served: ServedModel, settings: ServerSettings) -> TextModel:
    return TextModel(
        served.path,
        served.name,
        served.max_model_len,
        served.vocab_size,
        settings.max_sequences,
        served.aliases,
        settings.strict,
    )


def _cors(settings: ServerSettings) -> list[Middleware]:
    """What a browser must read before it lets another site's page ask."""
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=[origin.rstrip("/") for origin in settings.origins],
            allow_origin_regex=LOCAL_ORIGIN.pattern,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", HEADER],
        )
    ]


def _routes(service: Service) -> list[Route]:
    info, admin, responses = Info(service), Admin(service), Responses(service)
    ollama = OllamaModels(service)
    requests = RequestEndpoints(service)
    completions, chat = Generate(service, BodyKind.COMPLETION), Generate(service, BodyKind.CHAT)
    files, embeddings = Files(service), EmbeddingsEndpoint(service)
    batches = Batches(
        service,
        files,
        {
            "/v1/chat/completions": chat,
            "/v1/completions": completions,
            "/v1/responses": responses,
            "/v1/embeddings": embeddings,
        },
    )
    page, feeds = Page(), Feeds(service)
    service.at_start.extend((batches.start_watching, feeds.start_feeds))
    service.at_end.extend((batches.stop_working, feeds.end_feeds))
    return [
        Route("/", page.page, methods=["GET"]),
        Route(f"{PREFIX}{{name:path}}", page.file, methods=["GET"]),
        Route("/live", feeds.events, methods=["GET"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/responses/{response_id}", responses.show_response, methods=["GET"]),
        Route("/v1/responses/{response_id}", responses.delete_response, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/input_items", responses.input_items, methods=["GET"]),
        Route("/v1/files", files.create, methods=["POST"]),
        Route("/v1/files", files.list_files, methods=["GET"]),
        Route("/v1/files/{file_id}", files.show_file, methods=["GET"]),
        Route("/v1/files/{file_id}", files.delete_file, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", files.content, methods=["GET"]),
        Route("/v1/batches", batches.create, methods=["POST"]),
        Route("/v1/batches", batches.list_batches, methods=["GET"]),
        Route("/v1/batches/{batch_id}", batches.show_batch, methods=["GET"]),
        Route("/v1/batches/{batch_id}/cancel", batches.cancel_batch, methods=["POST"]),
        Route("/v1/messages", Spoken(service, BodyKind.MESSAGE, message), methods=["POST"]),
        Route("/v1/messages/count_tokens", info.count_message, methods=["POST"]),
        Route("/load", info.show_load, methods=["GET"]),
        Route("/api/tags", ollama.tags, methods=["GET"]),
        Route("/api/ps", ollama.ps, methods=["GET"]),
        Route("/api/show", ollama.show, methods=["POST"]),
        Route("/api/embed", EmbeddingsEndpoint(service, _EMBED, ollama_vectors), methods=["POST"]),
        Route("/api/embeddings", EmbeddingsEndpoint(service, _EMBED, ollama_vector), methods=["POST"]),
        Route("/api/version", info.version, methods=["GET"]),
        Route("/api/chat", Spoken(service, BodyKind.OLLAMA_CHAT, ollama_chat), methods=["POST"]),
        Route("/api/generate", Spoken(service, BodyKind.OLLAMA_GENERATE, ollama_generate), methods=["POST"]),
        Route("/v1/requests/{id}", requests.show_request, methods=["GET"]),
        Route("/v1/requests/{id}", requests.end_request, methods=["DELETE"]),
        Route("/v1/requests/{id}/events", Again(service, stream=True), methods=["GET"]),
        Route("/v1/requests/{id}/answer", Again(service, stream=False), methods=["GET"]),
        Route("/v1/models", info.models, methods=["GET"]),
        Route("/v1/models/{name:path}", info.model, methods=["GET"]),
        Route("/tokenize", info.tokenize, methods=["POST"]),
        Route("/detokenize", info.detokenize, methods=["POST"]),
        Route("/tokenizer_info", info.tokenizer, methods=["GET"]),
        Route("/health", info.health, methods=["GET"]),
        Route("/ping", info.health, methods=["GET"]),
        Route("/ready", info.show_ready, methods=["GET"]),
        Route("/version", info.version, methods=["GET"]),
        Route("/metrics", info.metrics, methods=["GET"]),
        Route("/status", info.status, methods=["GET"]),
        Route("/admin/placement", admin.show_placement, methods=["GET"]),
        Route("/admin/placement", admin.apply, methods=["POST"]),
        *(Route(verb.path, admin.change_handler(verb), methods=["POST"]) for verb in VERBS.values()),
        Route("/admin/routing/start", admin.start_recording, methods=["POST"]),
        Route("/admin/routing/stop", admin.stop_recording, methods=["POST"]),
        Route("/admin/routing/dump", admin.dump, methods=["GET"]),
    ]
