"""A tiny real tokenizer, a scripted engine, and the HTTP server on a real socket in a thread."""

import asyncio
import gc
import json
import threading
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders, models, pre_tokenizers, trainers

from afserve.control.backend import CacheKept, ServedModel
from afserve.control.requests import Request, Taker
from afserve.control.wire.change_values import Change, Changed, DrainOne
from afserve.control.wire.keeping import Keep
from afserve.control.wire.view_values import ClusterView, IncidentView, NodeView
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent, TokenLogprob
from afserve.engine.scheduling.routed_experts import RoutedExperts
from afserve.engine.stats import AttentionStats, ExpertStats
from afserve.errors import AfserveError, ConfigError, NotFoundError, OverloadedError, UnavailableError
from afserve.server.app import build_app
from afserve.server.http.settings import ServerSettings
from afserve.server.serve import bind, serve
from afserve.tokens.tokenizer import Tokenizer
from tests.server.kept import Answer, Found, Nodes, Opened
from tests.warm.interpreter import TEXTS

TEXT = [
    "def add(x, y):\n    return x + y\n",
    "the quick brown fox jumps over the lazy dog",
    "日本語のテキスト 😀 naïve café",
    "<|user|>hello<|end|><|assistant|>",
]
TEMPLATE = (
    "{% if not messages %}{{ raise_exception('no messages') }}{% endif %}"
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'alien' %}{{ raise_exception('unknown role alien') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "<|end|>", "<|user|>", "<|assistant|>"]


@pytest.fixture(scope="session", autouse=True)
def warm_text_processes() -> Iterator[None]:
    """Each imports as much as all others do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("afserve.server.text.text_pool.module", TEXTS.module)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE tokenizer, a chat template and the ids that end a text."""
    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = Vocabulary(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    vocabulary.train_from_iterator(TEXT * 4, trainer)
    vocabulary.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    return folder


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_folder(checkpoint)


INCIDENTS = (
    IncidentView(
        1e9,
        "lost",
        "expert-1",
        "expert",
        2,
        "ended",
        "its stream ended",
        "its rows go to replicas",
        stall=0.12,
    ),
    IncidentView(1e9 + 3, "returned", "expert-1", "expert", why="pid 7", seconds=2.5),
)


@dataclass
class ScriptedBackend:
    """Answers with `reply`'s tokens, `per_event` at a time; stops where a test wants it to."""

    model: ServedModel
    tokenizer: Tokenizer
    reply: str = " the quick brown fox"
    per_event: int = 1
    eos: bool = True
    fail_at: int | None = None
    error: AfserveError | None = None
    hold_at: int | None = None
    is_ready: bool = True
    nodes: tuple[NodeView, ...] = ()
    routed: tuple[tuple[int, ...], ...] = ((6, 2), (1, 1))
    applied: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    recording: bool = False
    recorded: tuple[bytes, ...] = ()
    requests: list[GenerationRequest] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    holding: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    nodes_kept: Nodes = field(default_factory=Nodes)
    admitted: list = field(default_factory=list)
    too_late: OverloadedError | None = None
    pushes: bool = False  # as a gateway does: whoever waits for an event is asked to take it
    taken: int = 0
    counts: dict = field(default_factory=dict)

    def ready(self) -> bool:
        return self.is_ready

    def admit(self, prompts, wanted) -> None:
        self.admitted.append((prompts, wanted))
        if self.too_late is not None:
            raise self.too_late

    def draw_counts(self, name, values) -> None:
        self.counts[name] = dict(values)

    def check(self) -> None:
        if not self.is_ready:
            raise UnavailableError("the server is not ready: it is starting", retry_after=2.0)

    async def view(self) -> ClusterView:
        said = ("2 s ago: move, 1.300 is over 1.080: 4 moves reach 1.020",)
        return ClusterView(
            3,
            self.nodes,
            {"attention": "1"},
            balance=(1.25, 1.0),
            decisions=said,
            moves=4,
            routed=self.routed,
            waiting=2,
            moved={"lost": 3},
            refused={"ttft": 5},
            incidents=INCIDENTS,
            lost={"expert": {"ended": 1}, "attention": {"silent": 2}},
            reloaded_bytes=4096,
            resent_rows=12,
            stalled={"unnoticed": 0.25, "moved": 0.5},
            wanted={"attention": 1, "expert": 2, "gateway": 0},
        )

    async def kept_cache(self, owner: str | None, *, unpin: bool, prompt=(), salt="") -> CacheKept:
        return CacheKept((), complete=True)

    async def placement(self) -> str:
        return '{"nodes": 1, "layers": []}'

    async def apply_placement(self, text: str) -> None:
        if "layers" not in text:
            raise ConfigError("not a placement file: it has no 'layers'")
        self.applied.append(text)

    async def record_routing(self, on: bool) -> bytes:
        self.recording = on
        return b"" if on else b"AFROUTE1 whole"

    async def recorded_routing(self) -> bytes:
        return b"AFROUTE1 so far"

    async def change(self, change: Change) -> Changed:
        if isinstance(change, DrainOne) and change.node != "expert-1":
            raise NotFoundError(f"node: {change.node!r} is none of this run's", param="node")
        self.changes.append(change)
        return Changed(
            {"attention": 2, "experts": 1, "gateways": 0}, ("attention-1",), ("expert-1",), ("a note",)
        )

    async def recordings(self) -> tuple[bytes, ...]:
        return self.recorded

    def open(
        self, request: GenerationRequest, keep: Keep | None = None, taker: Taker | None = None
    ) -> "Opened | Script":
        self.requests.append(request)
        if keep is None:
            return Script(self, request, taker)
        answer = self.nodes_kept.answers[keep.id, keep.choice] = Answer(request, keep)
        return Opened(self, answer)

    async def pushed(
        self, request: GenerationRequest, taker: Taker | None
    ) -> AsyncGenerator[TokenEvent, None]:
        opened = Request(request, taker=self._counted(taker))
        pushing = asyncio.create_task(self._push(opened, request))
        try:
            while True:
                event = await opened.get()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            pushing.cancel()
            await asyncio.gather(pushing, return_exceptions=True)

    def _counted(self, taker: Taker | None) -> Taker | None:
        def take(event: TokenEvent) -> bool:
            done = taker is not None and taker(event)
            self.taken += done
            return done

        return take

    async def _push(self, opened: Request, request: GenerationRequest) -> None:
        """An event per turn of the loop, whether anybody is ready for it or not."""
        try:
            async with aclosing(self.scripted(request)) as events:
                async for event in events:
                    opened.put(event)
        except AfserveError as error:
            opened.put(error)

    async def find(self, id: str, *, take: bool) -> list[Found]:
        return [Found(self, a) for (known, _), a in list(self.nodes_kept.answers.items()) if known == id]

    def answer_to(self, request: GenerationRequest) -> list[int]:
        ids = self.tokenizer.encode(self.reply)
        if self.eos and not request.params.ignore_eos:
            ids = [*ids, 1]
        else:
            ids = ids * (request.params.max_tokens // len(ids) + 1)
        return ids[: request.params.max_tokens]

    async def event_at(self, request: GenerationRequest, start: int, ids: list[int]) -> TokenEvent:
        """What comes after so many tokens."""
        limit = len(ids)
        if self.error is not None and start == (self.fail_at or 0):
            raise self.error
        new = tuple(ids[start : min(start + self.per_event, limit)])
        event = self._event(request, new, first=start == 0, last=start + len(new) >= limit)
        if request.params.return_routed_experts:
            length = len(request.prompt_ids)
            first = length + start - 1 if start else 0
            event.routed = RoutedExperts(2, 2, 1, experts_of(range(first, length + start + len(new) - 1)))
        return event

    async def scripted(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        start, ids = 0, self.answer_to(request)
        while True:
            await self._maybe_hold(start)
            event = await self.event_at(request, start, ids)
            yield event
            if event.finish_reason is not None:
                return
            start += len(event.token_ids)
            await asyncio.sleep(0)

    async def _maybe_hold(self, at: int) -> None:
        if self.hold_at == at:
            self.holding.set()
            while not self.release.is_set():
                await asyncio.sleep(0.002)

    def _event(
        self, request: GenerationRequest, new: tuple[int, ...], *, first: bool, last: bool
    ) -> TokenEvent:
        params = request.params
        stopped = last and new[-1] == 1
        scores = tuple(_score(t, params.logprobs) for t in new) if params.logprobs is not None else ()
        prompt: tuple[TokenLogprob | None, ...] = ()
        if first and params.prompt_logprobs is not None:
            prompt = (None, *(_score(t, params.prompt_logprobs) for t in request.prompt_ids[1:]))
        return TokenEvent(
            request.handle,
            new,
            finish_reason=("stop" if stopped else "length") if last else None,
            stop_token_id=1 if stopped else None,
            logprobs=scores,
            prompt_logprobs=prompt,
            cached_tokens=2 if first else 0,
            pooled=array("f", vector_of(request.prompt_ids)).tobytes() if params.pooled else b"",
        )


@dataclass
class Script:
    """One sequence that nobody asked to keep."""

    backend: ScriptedBackend
    request: GenerationRequest
    taker: Taker | None

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        backend, request = self.backend, self.request
        try:
            events = backend.pushed(request, self.taker) if backend.pushes else backend.scripted(request)
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            backend.closed.append(request)
            backend.ended.set()


def experts_of(positions: Sequence[int]) -> bytes:
    """What the scripted engine's two layers choose there."""
    return bytes(n for p in positions for n in (p % 7, 7 + p % 5, p % 3, 3 + p % 2))


def vector_of(ids: tuple[int, ...]) -> list[float]:
    """What the scripted engine gives for a prompt."""
    return [len(ids) / 3, -ids[-1] / 7, 1e-30]


def _score(token_id: int, top: int) -> TokenLogprob:
    others = tuple((token_id if i == 0 else 10 + i, -0.5 - i) for i in range(top))
    return TokenLogprob(token_id, -0.5, 1, others)


@pytest.fixture(scope="session")
def make_backend(checkpoint: Path, tokenizer: Tokenizer) -> Callable[..., ScriptedBackend]:
    def make(**settings: object) -> ScriptedBackend:
        model = ServedModel("tiny", str(checkpoint), 256, 400, 1_700_000_000, routed_bytes=4)
        return ScriptedBackend(model, tokenizer, **settings)  # type: ignore[arg-type]

    return make


@pytest.fixture
def nodes() -> tuple[NodeView, ...]:
    attention = AttentionStats(2, 1, kv_blocks=100, kv_blocks_used=25, prefix_queries=10, prefix_hits=4)
    return (
        NodeView("attention-0", "attention", "ready", 11, 0.1, 1 << 20, attention),
        NodeView("expert-0", "expert", "ready", 12, 0.2, 2 << 20, ExpertStats(5, 40, 4, 0.5, 0.1)),
    )


@pytest.fixture
def frozen_heap() -> None:
    """As in the gateway: full collections do not walk what is there from the start."""
    gc.collect()
    gc.freeze()


class Server:
    """The application on a loopback port, in a thread with its own event loop."""

    def __init__(
        self,
        backend: ScriptedBackend,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        others: Sequence[ScriptedBackend] = (),
    ) -> None:
        self.backend = backend
        self.app = build_app([(each, tokenizer) for each in (backend, *others)], settings)
        self._socket = bind("127.0.0.1", 0)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self._loop.run_until_complete(serve(self.app, self._socket, self._stop))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def start(self) -> None:
        self._thread.start()

    def ask_to_stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        if not self._loop.is_closed():
            self.ask_to_stop()
        self._thread.join()


@pytest.fixture(scope="session")
def run_server(tokenizer: Tokenizer) -> Callable[..., AbstractContextManager[Server]]:
    @contextmanager
    def run(backend: ScriptedBackend, *others: ScriptedBackend, **settings: object) -> Iterator[Server]:
        server = Server(backend, tokenizer, ServerSettings(**settings), others)  # type: ignore[arg-type]
        server.start()
        try:
            yield server
        finally:
            server.stop()

    return run


@pytest.fixture(scope="module")
def _shared(
    make_backend: Callable[..., ScriptedBackend], run_server: Callable[..., AbstractContextManager[Server]]
) -> Iterator[Server]:
    with run_server(make_backend()) as running:
        yield running


@pytest.fixture
def server(_shared: Server, make_backend: Callable[..., ScriptedBackend]) -> Server:
    """One server for all tests of a file; each finds its script fresh."""
    fresh = make_backend()
    for f in fields(ScriptedBackend):
        setattr(_shared.backend, f.name, getattr(fresh, f.name))
    return _shared


@pytest.fixture(scope="module")
def _client(_shared: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=_shared.url, timeout=20) as client:
        yield client


@pytest.fixture
def http(server: Server, _client: httpx.Client) -> httpx.Client:
    return _client
