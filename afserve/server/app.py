"""The HTTP application: which path is answered by whom. Serving it on a socket is in `serve`."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from afserve.control.backend import Backend, ServedModel
from afserve.control.wire.change_values import VERBS
from afserve.errors import AfserveError
from afserve.server.access.accounts import Accounts
from afserve.server.access.classes import read_classes
from afserve.server.access.keyring import Keyring
from afserve.server.answers.answering import Answering
from afserve.server.answers.hosted import Hosted, Models
from afserve.server.answers.next_turns import NextTurns, WarmPrompts
from afserve.server.answers.resumables import Resumables
from afserve.server.batches.endpoints import Batches, Files
from afserve.server.bodies.sampling import model_defaults
from afserve.server.endpoints.admin import Admin
from afserve.server.endpoints.cache import CacheEndpoints
from afserve.server.endpoints.elastic import ElasticEndpoints
from afserve.server.endpoints.embeddings import EmbeddingsEndpoint, ollama_vector, ollama_vectors
from afserve.server.endpoints.generate import Again, Generate, RequestEndpoints
from afserve.server.endpoints.info import Info
from afserve.server.endpoints.ollama_models import OllamaModels
from afserve.server.endpoints.service import Service
from afserve.server.endpoints.surfaces import Responses, Spoken, message, ollama_chat, ollama_generate
from afserve.server.endpoints.warm import WarmEndpoint
from afserve.server.gate import LOCAL_ORIGIN, Gate
from afserve.server.http.audit_log import AuditLog
from afserve.server.http.body import Bodies
from afserve.server.http.connections import Connections
from afserve.server.http.settings import ServerSettings
from afserve.server.live.feed import Feeds
from afserve.server.live.page import PREFIX, Page
from afserve.server.metrics.goodput import Times
from afserve.server.metrics.observe import HttpMetrics
from afserve.server.metrics.spans import Spans
from afserve.server.openapi.document import BYTES, EVENTS, FORM, HTML, LINES, PLAIN, DocumentedRoutes
from afserve.server.replies.ignored import HEADER
from afserve.server.replies.refusal import on_afserve_error, on_bug, on_http_exception
from afserve.server.state.database import Database
from afserve.server.text.kinds import BodyKind
from afserve.server.text.prepare import Preparer
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
        [
            Hosted.over_backend(backend, tokenizer, http.clock, times, settings.answer_tokens)
            for backend, tokenizer in models
        ]
    )
    database = Database(settings.state_dir)
    ring = Keyring(settings.api_keys, settings.admin_keys, settings.keys_file)
    classes = read_classes(settings.classes_file) if settings.classes_file else None
    accounts = Accounts(ring, database, shares_prefixes=settings.share_prefixes, classes=classes)
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
        audit=AuditLog(settings.audit_log) if settings.audit_log else None,
    )
    for each in hosted if settings.warm_ahead else ():
        turns = NextTurns(service.text, each)
        each.followers.append(turns.answered)
        warm = WarmPrompts(each)
        each.keeping_warm.extend((warm, turns))
        service.at_start.append(warm.begin)
        service.at_end.extend((turns.end, warm.end))
    app = Starlette(
        routes=_routes(service).described(),
        middleware=[
            *_cors(settings),
            Middleware(
                Gate,
                settings=settings,
                metrics=http,
                connections=service.connections,
                accounts=accounts,
                spans=service.spans,
                audit=service.audit,
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
        served.drafts,
        served.routed_bytes,
        settings.left_out_lines,
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


def _routes(service: Service) -> DocumentedRoutes:
    table = DocumentedRoutes()
    _add_page_and_openai(table, service)
    _add_other_apis(table, service)
    _add_gateway(table, service)
    return table


def _add_page_and_openai(table: DocumentedRoutes, service: Service) -> None:
    page, feeds, files = Page(), Feeds(service), Files(service)
    completions, chat = Generate(service, BodyKind.COMPLETION), Generate(service, BodyKind.CHAT)
    responses, embeddings = Responses(service), EmbeddingsEndpoint(service)
    batched: dict[str, ASGIApp] = {
        "/v1/chat/completions": chat,
        "/v1/completions": completions,
        "/v1/responses": responses,
        "/v1/embeddings": embeddings,
    }
    batches = Batches(service, files, batched)
    service.at_start.extend((batches.start_watching, feeds.start_feeds))
    service.at_end.extend((batches.stop_working, feeds.end_feeds))
    get, post, delete = table.adders()
    get("/", page.page, "The live page.", gives="Text", media=HTML)
    get(f"{PREFIX}{{name:path}}", page.file, "A file of the page.", gives="Text", media=PLAIN)
    get(
        "/live", feeds.show_frames, "A frame a second of the nodes, for the page.", gives="Text", media=EVENTS
    )
    post(
        "/v1/completions", completions, "Continue a text.", "CompletionRequest", "Completion", streams=EVENTS
    )
    post("/v1/chat/completions", chat, "Answer a chat.", "ChatRequest", "Chat", streams=EVENTS)
    post("/v1/embeddings", embeddings, "Vectors of texts.", "EmbeddingRequest", "Embeddings")
    post(
        "/v1/responses",
        responses,
        "Answer, and keep the answer.",
        "ResponseRequest",
        "Response",
        streams=EVENTS,
    )
    get("/v1/responses/{response_id}", responses.show_response, "A kept response.", gives="Response")
    delete("/v1/responses/{response_id}", responses.delete_response, "Forget a response.", gives="Deleted")
    get("/v1/responses/{response_id}/input_items", responses.input_items, "What a response was asked.")
    post("/v1/files", files.create, "Keep a file.", "FileForm", "File", form=FORM)
    get("/v1/files", files.list_files, "Files that are kept.", gives="Files")
    get("/v1/files/{file_id}", files.show_file, "About a file.", gives="File")
    delete("/v1/files/{file_id}", files.delete_file, "Forget a file.", gives="Deleted")
    get("/v1/files/{file_id}/content", files.content, "A file.", gives="Text", media=BYTES)
    post("/v1/batches", batches.create, "Answer the lines of a file.", "BatchRequest", "Batch")
    get("/v1/batches", batches.list_batches, "Batches.", gives="Batches")
    get("/v1/batches/{batch_id}", batches.show_batch, "About a batch.", gives="Batch")
    post("/v1/batches/{batch_id}/cancel", batches.cancel_batch, "End a batch.", gives="Batch")


def _add_other_apis(table: DocumentedRoutes, service: Service) -> None:
    """Anthropic's and Ollama's."""
    info, ollama = Info(service), OllamaModels(service)
    messages = Spoken(service, BodyKind.MESSAGE, message)
    chat = Spoken(service, BodyKind.OLLAMA_CHAT, ollama_chat)
    generate = Spoken(service, BodyKind.OLLAMA_GENERATE, ollama_generate)
    vectors, vector = (
        EmbeddingsEndpoint(service, _EMBED, drawn) for drawn in (ollama_vectors, ollama_vector)
    )
    get, post, _ = table.adders()
    post("/v1/messages", messages, "Anthropic's chat.", "MessageRequest", streams=EVENTS)
    post("/v1/messages/count_tokens", info.count_message, "Tokens of Anthropic's chat.", "MessageRequest")
    get("/load", info.show_load, "Requests that are being answered.")
    get("/api/tags", ollama.tags, "The models in Ollama's words.")
    get("/api/ps", ollama.ps, "The models that are loaded, which are all.")
    post("/api/show", ollama.show, "About a model.", "OllamaModel")
    post("/api/embed", vectors, "Vectors of texts.", "OllamaEmbedRequest")
    post("/api/embeddings", vector, "The vector of a text.", "OllamaRequest")
    get("/api/version", info.version, "The version in Ollama's words.")
    post("/api/chat", chat, "Ollama's chat.", "OllamaChatRequest", streams=LINES)
    post("/api/generate", generate, "Ollama's completion.", "OllamaRequest", streams=LINES)


def _add_gateway(table: DocumentedRoutes, service: Service) -> None:
    """What this gateway is asked about itself, and what it is told to do."""
    info, admin, requests = Info(service), Admin(service), RequestEndpoints(service)
    events, answer = (Again(service, stream=stream) for stream in (True, False))
    get, post, delete = table.adders()
    get("/v1/requests/{id}", requests.show_request, "About a request that runs or is kept.")
    delete("/v1/requests/{id}", requests.end_request, "End a request that runs or is kept.")
    get("/v1/requests/{id}/events", events, "Go on with its stream.", gives="Stream", media=EVENTS)
    get("/v1/requests/{id}/answer", answer, "Its whole answer.")
    post(
        "/v1/cache/warm",
        WarmEndpoint(service),
        "Compute a prompt that will come, and keep it.",
        "WarmRequest",
    )
    cache = CacheEndpoints(service)
    get("/v1/cache", cache.show_kept, "What caches keep because a key asked for it.")
    delete("/v1/cache", cache.delete_kept, "Keep it no longer.")
    post("/v1/cache/unpin", cache.unpin_prompt, "Keep a prompt no longer.", "WarmRequest")
    get("/v1/models", info.models, "The models.", gives="Models")
    get("/v1/models/{name:path}", info.model, "About a model.", gives="Model")
    post("/tokenize", info.tokenize, "Tokens of a text or chat.", "TokenizeRequest", "Tokens")
    post("/detokenize", info.detokenize, "Text of tokens.", "DetokenizeRequest", "Prompt")
    get("/tokenizer_info", info.tokenizer, "Special tokens and chat template.")
    get("/health", info.health, "Whether this gateway answers.")
    get("/ping", info.health, "Whether this gateway answers, as some platforms ask.")
    get("/ready", info.show_ready, "Whether requests are taken.")
    get("/version", info.version, "The version.")
    get("/metrics", info.metrics, "For Prometheus.", gives="Text", media=PLAIN)
    get("/status", info.status, "The nodes.")
    get("/admin/placement", admin.show_placement, "The placement in force.")
    post("/admin/placement", admin.apply, "Go to another placement.", "Any", status=202)
    for verb in VERBS.values():
        post(verb.path, admin.change_handler(verb), verb.summary, verb.name.capitalize(), status=202)
    elastic = ElasticEndpoints(admin)
    post("/scale_elastic_ep", elastic.scale, "vLLM's /admin/scale of attention nodes.", "ElasticSize")
    post("/is_scaling_elastic_ep", elastic.is_scaling, "Whether nodes come or go.")
    post("/admin/routing/start", admin.start_recording, "Record routing counts.")
    post(
        "/admin/routing/stop",
        admin.stop_recording,
        "End the recording and get it.",
        gives="Text",
        media=BYTES,
    )
    get("/admin/routing/dump", admin.dump, "What was recorded so far.", gives="Text", media=BYTES)
