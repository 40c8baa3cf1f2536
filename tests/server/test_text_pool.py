"""Requests are prepared alike on the loop and in a process, and whatever a template does costs its own request only."""

import asyncio
import json
import os
import signal
import time
from contextlib import asynccontextmanager
from dataclasses import asdict

import httpx
import psutil
import pytest

from afserve import child
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import AfserveError, CapacityError, CheckpointError, OverloadedError, RequestError
from afserve.server.bodies.prepared import Computed, from_bytes, to_bytes
from afserve.server.http.settings import ServerSettings
from afserve.server.text.kinds import BodyKind
from afserve.server.text.prepare import Preparer
from afserve.server.text.preparers import Preparers
from afserve.server.text.prompt_tokens import Elsewhere, TextModel
from afserve.server.text.text_pool import INLINE_BYTES, TextPool
from afserve.tokens.chat_template import ChatTemplate
from afserve.tokens.tokenizer import Tokenizer

NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DEEP = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
HUGE = "{{ 'a' * 2000000000 }}"
WHEN_ASKED = "{% if messages[0].content == 'bomb' %}%s{% endif %}{{ messages[0].content }}"
PAD = " " * INLINE_BYTES
BODIES = [
    (
        BodyKind.COMPLETION,
        {"prompt": "def add(x, y):", "stop": ["a", "b"], "logit_bias": {"7": 1.5}, "seed": 3},
    ),
    (BodyKind.COMPLETION, {"prompt": ["x", [5, 6]], "n": 2, "echo": True, "logprobs": 2, "max_tokens": 0}),
    (BodyKind.COMPLETION, {"prompt": [5], "stream": True, "stream_options": {"include_usage": True}}),
    (BodyKind.COMPLETION, {"prompt": [5], "temperature": 3}),
    (BodyKind.COMPLETION, {"prompt": [5], "model": "other"}),
    (BodyKind.COMPLETION, {"prompt": [5] * 300}),
    (BodyKind.CHAT, {"messages": [{"role": "user", "content": "日本 x"}], "stop_token_ids": [5]}),
    (BodyKind.TOKENIZE, {"prompt": "a b c", "return_token_strs": True}),
    (BodyKind.DETOKENIZE, {"tokens": [5, 6, 7]}),
]


@pytest.fixture(autouse=True)
def processes_of_their_own(monkeypatch):
    """Their beginning, limits and ends are tested here."""
    monkeypatch.setattr("afserve.server.text.text_pool.module", child.module)


@pytest.fixture
def folder_with(checkpoint, tmp_path):
    """The tiny checkpoint with another chat template."""

    def make(template):
        for file in checkpoint.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "chat_template.jinja").write_text(template)
        return tmp_path

    return make


def model_of(folder):
    return TextModel(str(folder), "tiny", 256, 400, 256)


def preparers_of(folder, tokenizer):
    template = ChatTemplate.from_folder(folder)
    return Preparers([Preparer(model_of(folder), tokenizer, SamplingParams(), template)])


@asynccontextmanager
async def pool(folder, tokenizer, **settings):
    preparer = Preparer(model_of(folder), tokenizer, SamplingParams(), elsewhere=True)
    made = TextPool(Preparers([preparer]), [model_of(folder)], ServerSettings(**settings))
    try:
        yield made
    finally:
        await made.end_processes()


BOMBS = [r"(a+)+$|(x*x*x*)*y", r"(\w+\s?)*$"]


@pytest.fixture
def tokenizer_with(checkpoint, tmp_path):
    """The tiny checkpoint, whose tokenizer splits by another expression first."""

    def make(expression):
        for file in checkpoint.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
        body = json.loads((checkpoint / "tokenizer.json").read_text())
        split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        rest = [body["pre_tokenizer"]] if body["pre_tokenizer"] else []
        body["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, *rest]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(body))
        return tmp_path

    return make


def bodies_of(text):
    """Everything that a text of a client is tokenised for."""
    said = [{"role": "user", "content": text}]
    yield BodyKind.COMPLETION, {"prompt": text}
    yield BodyKind.COMPLETION, {"prompt": ["x", text]}
    yield BodyKind.TOKENIZE, {"prompt": text}
    yield BodyKind.EMBEDDING, {"input": [text]}
    yield BodyKind.CHAT, {"messages": said}
    yield BodyKind.MESSAGE_COUNT, {"messages": said}
    yield BodyKind.MESSAGE, {"messages": said, "max_tokens": 1}
    yield BodyKind.OLLAMA_GENERATE, {"model": "tiny", "prompt": text, "stream": False}


@pytest.mark.slow
@pytest.mark.parametrize("expression", BOMBS)
def test_a_tokenizer_that_takes_without_end_is_asked_where_there_are_limits(expression, tokenizer_with):
    """What it cannot do is refused in words, one text at a time; others are answered by that process or the next."""
    folder = tokenizer_with(expression)
    tokenizer = Tokenizer.from_folder(folder)
    here = Preparers([Preparer(model_of(folder), tokenizer, SamplingParams(), elsewhere=True)])

    async def all_of_them():
        async with pool(folder, tokenizer, text_seconds=1.0, text_processes=1) as there:
            for kind, body in bodies_of("a" * 100 + "x" * 100 + "!"):
                data = json.dumps(body).encode()
                with pytest.raises(Elsewhere):
                    here.prepare(kind, data)
                with pytest.raises(RequestError, match=r"its own rules take too many steps|of CPU time"):
                    await there.prepare(kind, data)
            assert await there.prepare(BodyKind.TOKENIZE, json.dumps({"prompt": "b"}).encode())

    asyncio.run(all_of_them())


def chat(content):
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


def outcome(answer):
    return answer if isinstance(answer, bytes) else asdict(answer)


def refused(error):
    return type(error).__name__, error.message, error.param


@pytest.mark.slow
def test_a_process_prepares_what_the_loop_prepares(checkpoint, tokenizer):
    here = preparers_of(checkpoint, tokenizer)

    async def both():
        async with pool(checkpoint, tokenizer) as there:
            for kind, body in BODIES:
                data = json.dumps(body).encode()
                try:
                    wanted = outcome(here.prepare(kind, data))
                except AfserveError as error:
                    with pytest.raises(type(error)) as found:
                        await there.prepare(kind, data + PAD.encode())
                    assert refused(found.value) == refused(error)
                else:
                    assert outcome(await there.prepare(kind, data + PAD.encode())) == wanted

    asyncio.run(both())


def test_answers_as_bytes(checkpoint, tokenizer):
    here = preparers_of(checkpoint, tokenizer)
    answer = here.prepare(BodyKind.COMPLETION, json.dumps(BODIES[1][1]).encode())
    assert from_bytes(to_bytes(answer)) == answer
    computed = Computed(b'{"a":1}', ("store", "tools[0].x"))
    assert from_bytes(to_bytes(computed)) == computed
    many = here.prepare(BodyKind.COMPLETION, b'{"prompt": [[' + b",".join([b"5"] * 250) + b"]]}")
    assert len(to_bytes(many)) < 4 * 250 + 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bomb", "reason"), [(NESTED, "--text-seconds"), (HUGE, "--text-mib"), (DEEP, "goes too deep")]
)
def test_a_template_costs_its_own_request_only(folder_with, tokenizer, bomb, reason):
    folder = folder_with(
        WHEN_ASKED.replace("%s", bomb).replace("2000000000", "(900000000 * messages | length)")
    )

    async def ask():
        async with pool(folder, tokenizer, text_seconds=0.3, text_mib=256, text_processes=1) as there:
            await there.start_ahead()
            for _ in range(2):
                with pytest.raises(RequestError, match=reason):
                    await there.prepare(BodyKind.CHAT, chat("bomb"))
                assert len((await there.prepare(BodyKind.CHAT, chat("x"))).prompts[0]) == 1

    asyncio.run(ask())


@pytest.mark.slow
@pytest.mark.parametrize(("bomb", "reason"), [(NESTED, "0.5 s of CPU time"), (HUGE, "256 MiB of memory")])
def test_a_template_without_end_is_found_at_the_start(folder_with, tokenizer, bomb, reason):
    async def start():
        async with pool(folder_with(bomb), tokenizer, text_seconds=0.5, text_mib=256) as there:
            with pytest.raises(CheckpointError, match=f"chat template: .* more than {reason}"):
                await there.start_ahead()

    asyncio.run(start())


@pytest.mark.slow
def test_a_template_that_only_refuses_is_served(folder_with, tokenizer):
    async def start():
        async with pool(folder_with("{{ raise_exception('no') }}"), tokenizer) as there:
            await there.start_ahead()
            with pytest.raises(RequestError, match="does not accept them: no"):
                await there.prepare(BodyKind.CHAT, chat("x"))

    asyncio.run(start())


@pytest.mark.slow
def test_a_template_that_cannot_be_compiled(folder_with, tokenizer):
    async def start():
        async with pool(folder_with("{% for %}"), tokenizer) as there:
            with pytest.raises(CheckpointError, match="chat template, line 1"):
                await there.start_ahead()

    asyncio.run(start())


@pytest.mark.slow
def test_more_than_may_wait_are_told_to_come_again(folder_with, tokenizer):
    folder = folder_with(WHEN_ASKED.replace("%s", NESTED))

    async def ask():
        async with pool(folder, tokenizer, text_seconds=1, text_processes=1, text_waiting=1) as there:
            await there.start_ahead()
            asked = [
                asyncio.create_task(there.prepare(BodyKind.CHAT, chat(text))) for text in ("bomb", "x", "y")
            ]
            done = await asyncio.gather(*asked, return_exceptions=True)
            assert isinstance(done[0], RequestError) and isinstance(done[2], OverloadedError)
            assert len(done[1].prompts) == 1

    asyncio.run(ask())


@pytest.fixture
def hangs_up():
    """Below nohup children inherit that SIGHUP is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def children():
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("seen", [False, True], ids=["now", "before"])
@pytest.mark.usefixtures("hangs_up")
def test_processes_that_wait_and_are_killed_are_replaced(checkpoint, tokenizer, number, seen):
    """No request fails, whether or not their ends were noticed before it came."""

    async def ask():
        before = children()
        async with pool(checkpoint, tokenizer, text_processes=2) as there:
            await there.start_ahead()
            await there.start_ahead()
            for mine in children() - before:
                os.kill(mine, number)
            while seen and children() - before:
                await asyncio.sleep(0.01)
            assert (await there.prepare(BodyKind.CHAT, chat("x"))).prompts
        assert children() <= before

    asyncio.run(ask())


def test_a_process_that_is_killed_over_a_request_is_replaced_once(folder_with, tokenizer):
    folder = folder_with(WHEN_ASKED.replace("%s", NESTED))

    async def ask():
        async with pool(folder, tokenizer, text_processes=1, text_seconds=60) as there:
            before = children()
            asked = asyncio.create_task(there.prepare(BodyKind.CHAT, chat("bomb")))
            for _ in range(2):
                while not (mine := children() - before):
                    await asyncio.sleep(0.01)
                before |= mine
                os.kill(mine.pop(), signal.SIGKILL)
            with pytest.raises(CapacityError, match="send this one again"):
                await asked

    asyncio.run(ask())


@pytest.mark.slow
def test_one_who_gives_up_leaves_no_answer_to_the_next(folder_with, tokenizer):
    folder = folder_with(WHEN_ASKED.replace("%s", "{% for a in range(99999) %}{% endfor %}"))

    async def ask():
        async with pool(folder, tokenizer, text_processes=1) as there:
            await there.start_ahead()
            slow = asyncio.create_task(there.prepare(BodyKind.CHAT, chat("bomb")))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            slow.cancel()
            assert len((await there.prepare(BodyKind.CHAT, chat("x"))).prompts[0]) == 1

    asyncio.run(ask())


@pytest.mark.slow
def test_other_requests_go_on_while_a_template_runs(make_backend, run_server, folder_with, tokenizer):
    backend = make_backend()
    folder = folder_with(WHEN_ASKED.replace("%s", NESTED))
    backend.model = type(backend.model)("tiny", str(folder), 256, 400, 1)
    with run_server(backend, text_seconds=1) as server, httpx.Client(base_url=server.url) as http:
        with httpx.Client(base_url=server.url, timeout=60) as bomber:
            import threading

            replies = []
            ask = {"messages": [{"role": "user", "content": "bomb"}]}
            thread = threading.Thread(
                target=lambda: replies.append(bomber.post("/v1/chat/completions", json=ask))
            )
            thread.start()
            served = 0
            until = time.monotonic() + 60
            while thread.is_alive() and time.monotonic() < until:
                assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
                served += 1
            thread.join()
        assert served > 10 and replies[0].status_code == 400
        assert "--text-seconds" in replies[0].json()["error"]["message"]
