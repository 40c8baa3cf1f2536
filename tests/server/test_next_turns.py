"""--warm-ahead: what is computed once a chat was answered is the beginning of its next prompt, in every family's form;
nobody waits for it, and without the flag there is none."""

import asyncio
import time
from array import array
from contextlib import suppress
from types import SimpleNamespace

import httpx
import pytest

from afserve.clock import FakeClock
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import OverloadedError, UnavailableError
from afserve.server.answers import next_turns
from afserve.server.answers.next_turns import MOST, NextTurns, WarmPrompts
from afserve.server.bodies.declared import Scheduling
from afserve.server.bodies.fields import Fields
from afserve.server.text.kinds import BodyKind
from afserve.server.text.prepare import Preparer
from afserve.server.text.prompt_tokens import TextModel
from tests.server.rendered import rendered
from tests.server.test_earlier import FAMILIES, FOUND

TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
BLOCK = 4
BEGIN_REASONING = {"minimax-m2", "laguna"}  # prompts of these do
SHOWS_NO_TOOLS = {"deepseek-v3", "deepseek-v3.1"}  # as these templates are shortened here


def preparer_of(family):
    template, tokenizer = FOUND[family]
    model = TextModel("", "tiny", 4096, tokenizer.vocab_size, 16)
    return Preparer(model, tokenizer, SamplingParams(), template), tokenizer


def prompt_of(preparer, chat):
    return preparer.prepare(BodyKind.CHAT, Fields(chat)).prompts[0]


def ahead_of(preparer, chat, answer, kind=BodyKind.CHAT):
    body = {"kind": int(kind), "answer": answer, "asked": chat}
    return preparer.prepare(BodyKind.NEXT_TURN, Fields(body)).prompts[0]


@pytest.mark.parametrize("family", FOUND)
def test_what_is_computed_ahead_of_a_call_begins_the_next_prompt(family):
    preparer, tokenizer = preparer_of(family)
    form = FAMILIES[family][1]
    chat = {"messages": [{"role": "user", "content": "Look into the file."}], "tools": [TOOL]}
    said = f"I look.{FAMILIES[family][3]}{rendered(form, [('read', {'path': 'a.txt'})])}"
    said = f"</think>\n\n{said}" if family in BEGIN_REASONING else said
    ahead = ahead_of(preparer, chat, tokenizer.encode(said, add_special_tokens=False))
    call = {
        "id": "call_x",
        "type": "function",
        "function": {"name": "read", "arguments": '{"path": "a.txt"}'},
    }
    result = {"role": "tool", "tool_call_id": "call_x", "content": "It has nothing."}
    words = f"I look.{FAMILIES[family][3]}"  # as its client has read them
    answer = {"role": "assistant", "content": words, "tool_calls": [call]}
    following = prompt_of(preparer, {**chat, "messages": [*chat["messages"], answer, result]})
    own_ids = family.startswith(("mistral", "kimi"))  # these ids are drawn anew, and shown
    least = 0.3 if own_ids else 1.0
    equal = next(
        (at for at, ids in enumerate(zip(ahead, following, strict=False)) if ids[0] != ids[1]), len(ahead)
    )
    assert len(ahead) > len(prompt_of(preparer, chat)) and equal >= least * len(ahead) - BLOCK
    if family not in SHOWS_NO_TOOLS:
        assert "It has nothing" not in tokenizer.decode(ahead) and len(following) > len(ahead)


@pytest.mark.parametrize("earlier", ["nothing", "kept", "dropped"])
@pytest.mark.parametrize("kind", [BodyKind.CHAT, BodyKind.MESSAGE])
def test_reasoning_comes_back_as_it_did_before(kind, earlier):
    preparer, tokenizer = preparer_of("hermes")
    messages = [{"role": "user", "content": "One?"}]
    if earlier != "nothing":
        thought = {"reasoning_content": "Hm."} if earlier == "kept" else {}
        block = [{"type": "thinking", "thinking": "Hm.", "signature": ""}] if earlier == "kept" else []
        of_message = {"content": [*block, {"type": "text", "text": "Yes."}]}
        answer = of_message if kind is BodyKind.MESSAGE else {"content": "Yes.", **thought}
        messages += [{"role": "assistant", **answer}, {"role": "user", "content": "Two?"}]
    chat = {"messages": messages, "max_tokens": 9}
    said = tokenizer.encode("<think>\nWell.\n</think>\n\nNo.", add_special_tokens=False)
    text = tokenizer.decode(ahead_of(preparer, chat, said, kind), skip_special_tokens=False)
    returns = earlier == "kept" or (earlier == "nothing" and kind is BodyKind.MESSAGE)
    assert ("Well." in text) is returns and "No." in text


def test_the_gateway_asks_for_it_behind_everybody(make_backend, run_server):
    backend = make_backend()
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, "cache_salt": "own"}
    with run_server(backend, warm_ahead=True) as running, httpx.Client(base_url=running.url) as http:
        answer = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
        assert waits_for(lambda: len(backend.requests) == 2), "nothing was computed ahead"
        ahead = backend.requests[-1]
        assert ahead.ahead and ahead.cache_salt == "own" and ahead.params.max_tokens == 1
        said = [{"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]
        chat["messages"] += said
        http.post("/v1/chat/completions", json=chat)
        asked = backend.requests[2]
        assert not asked.ahead and asked.prompt_ids[: len(ahead.prompt_ids)] == ahead.prompt_ids
        assert len(ahead.prompt_ids) > len(backend.requests[0].prompt_ids)


def test_warm_prompts_are_computed_again_while_they_are_to_stay(make_backend, run_server, monkeypatch):
    monkeypatch.setattr("afserve.server.app.WarmPrompts", lambda model: WarmPrompts(model, pause=0.05))
    backend = make_backend()
    with run_server(backend, warm_ahead=True) as running, httpx.Client(base_url=running.url) as http:
        assert http.post("/v1/cache/warm", json={"prompt": "hello hello", "retain": 600}).status_code == 200
        assert http.post("/v1/cache/warm", json={"prompt": "other words", "retain": 0}).status_code == 200
        first = backend.requests[0].prompt_ids
        assert waits_for(lambda: sum(one.ahead for one in backend.requests) >= 2), "nobody looked after it"
        assert http.delete("/v1/cache").status_code == 200
        keeper, _ = running.app.state.service.models.first_model.keeping_warm
        assert not keeper.kept
    again = [one for one in backend.requests if one.ahead]
    assert {one.prompt_ids for one in again} == {first} and all(500 < one.retain <= 600 for one in again)


class Looked(WarmPrompts):
    """What it would compute again."""

    def __init__(self, backend, pause=0.0):
        metrics = SimpleNamespace(clock=FakeClock())
        super().__init__(SimpleNamespace(backend=backend, metrics=metrics, model_name="nano"), pause)

    def warm(self, owner, *prompts, salt="", retain=600.0):
        scheduling = Scheduling(tenant=owner, cache_salt=salt, retain=retain)
        self.warmed(SimpleNamespace(prompts=[array("i", one) for one in prompts], scheduling=scheduling))

    def tokens(self):
        return [array("i", tokens).tolist() for _, tokens, _ in self.kept]


def test_what_is_unpinned_is_looked_after_no_longer(make_backend):
    looked = Looked(make_backend())
    looked.warm("alice", [1, 2], [1, 2, 3], [4])
    looked.warm("bob/batch", [5], [1, 2, 3, 4], salt="own")
    looked.unpinned("alice", array("i", [1, 2, 3]), "")
    assert looked.tokens() == [[4], [5], [1, 2, 3, 4]], "its beginning has the same blocks"
    looked.unpinned("alice", array("i", [5]), "own")
    looked.unpinned("bob", array("i", [5]), "")
    assert looked.tokens() == [[4], [5], [1, 2, 3, 4]], "another key's, and another salt's"
    looked.unpinned("bob", array("i"), "")
    assert looked.tokens() == [[4]]
    looked.unpinned(None, array("i"), "")
    assert not looked.tokens()


def test_whoever_warms_the_most_loses_the_first(make_backend):
    looked = Looked(make_backend())
    looked.warm("alice", [1], [2])
    looked.warm("bob", *([number] for number in range(10, 10 + MOST)))
    assert looked.tokens() == [[1], [2], *([number] for number in range(12, 10 + MOST))]


def test_what_has_expired_goes_before_anybody_loses_a_prompt(make_backend):
    looked = Looked(make_backend())
    looked.warm("bob", *([number] for number in range(MOST - 1)))
    looked.warm("alice", [100], retain=1.0)
    looked._model.metrics.clock.advance(2.0)
    looked.warm("alice", [101])
    assert looked.tokens() == [*([number] for number in range(MOST - 1)), [101]]


def test_each_key_has_its_own_wish_and_the_longer_one_of_two(make_backend):
    looked = Looked(make_backend())
    looked.warm("alice", [1])
    looked.warm("alice/batch", [1], retain=5.0)
    looked.warm("bob", [1], retain=5.0)
    assert [until for until, _ in looked.kept.values()] == [600.0, 5.0]
    looked.unpinned("bob", array("i", [1]), "")
    assert [owner for owner, _, _ in looked.kept] == ["alice"]


@pytest.mark.parametrize(
    ("then", "looks_on"),
    [("fails", True), ("unpinned", True), ("warmed again", True), ("sleeps", False), ("late", False)],
)
def test_who_is_looked_after_behind_one_that_ended_otherwise(then, looks_on, make_backend, monkeypatch):
    """The last one first. Only where nodes have no time, or are not there, do the others wait for the next look."""
    monkeypatch.setattr("afserve.server.answers.next_turns.SECONDS", 0.01 if then == "late" else 600.0)

    async def play():
        backend = make_backend()
        backend.open = open_
        looked = Looked(backend, pause=0.001)
        looked.warm("alice", [1], [2], retain=5.0)
        await looked.begin()
        await asyncio.wait_for(begun.wait(), 20)
        if then == "unpinned":
            looked.warm("alice", [3])
            looked.unpinned(None, array("i", [2]), "")
        elif then == "warmed again":
            looked._model.metrics.clock.advance(10.0)
            looked.warm("alice", [1])
            ended.set()
        while len(opened) < 2:
            await asyncio.sleep(0.001)
        await looked.end()

    def open_(request):
        opened.append(request.prompt_ids)
        begun.set()
        if then in ("fails", "sleeps"):
            raise (OverloadedError if then == "fails" else UnavailableError)("no")
        return SimpleNamespace(events=waits)

    async def waits():
        await ended.wait()
        return
        yield

    opened, begun, ended = [], asyncio.Event(), asyncio.Event()
    asyncio.run(asyncio.wait_for(play(), 20))
    assert opened[:2] == [(2,), (1,) if looks_on else (2,)]


def test_one_whose_time_is_over_may_be_let_go_while_it_ends(make_backend):
    async def play():
        looked = Looked(make_backend())
        looked.warm("alice", [1])
        (key,) = looked.kept
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.0) as limit:
                looked._computed = key, limit
                try:
                    await asyncio.sleep(20)
                finally:
                    assert limit.expired()
                    looked.unpinned("alice", array("i"), "")
        assert not looked.kept

    asyncio.run(play())


def test_a_next_turn_is_not_computed_once_its_key_lets_go(make_backend):
    def asked(owner, salt):
        return SimpleNamespace(
            body=b"{}", params=SamplingParams(), scheduling=Scheduling(tenant=owner, cache_salt=salt)
        )

    async def left(*told):
        turns = NextTurns(SimpleNamespace(idle=False), looked._model)
        for owner, salt in (("alice", ""), ("alice", "own"), ("bob", "")):
            turns.answered(asked(owner, salt), array("i"), None)
        await asyncio.sleep(0)
        turns.unpinned(*told)
        assert await turns.left()
        try:
            return [(one.tenant, one.cache_salt) for one in turns._tasks.values()]
        finally:
            await turns.end()

    looked, every, one = Looked(make_backend()), array("i"), array("i", [1])
    assert asyncio.run(left("alice", every, "")) == [("bob", "")]
    assert asyncio.run(left("alice", one, "own")) == [("alice", ""), ("bob", "")]
    assert asyncio.run(left("carol", every, "")) == [("alice", ""), ("alice", "own"), ("bob", "")]
    assert asyncio.run(left(None, every, "")) == []


def test_what_is_unpinned_while_it_is_computed_ends(make_backend):
    """No node had time for it yet."""

    async def unpinned():
        backend = make_backend()
        backend.open = lambda request: SimpleNamespace(events=waits)
        looked = Looked(backend)
        looked.warm("alice", [1, 2])
        await looked.begin()
        await asyncio.wait_for(begun.wait(), 20)
        looked.unpinned(None, array("i"), "")
        await asyncio.wait_for(ended.wait(), 20)
        await looked.end()

    async def waits():
        begun.set()
        try:
            await asyncio.sleep(600)
            yield
        finally:
            ended.set()

    begun, ended = asyncio.Event(), asyncio.Event()
    asyncio.run(unpinned())


@pytest.mark.slow
def test_without_the_flag_nothing_is_computed_ahead(http, server):
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
    for _ in range(2):
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
    assert not any(request.ahead for request in server.backend.requests)


def test_nobody_can_ask_for_that_priority(http):
    chat = {"messages": [{"role": "user", "content": "hello"}], "priority": (1 << 20) + 1}
    assert http.post("/v1/chat/completions", json=chat).status_code == 400


def waits_for(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def test_who_lets_go_waits_until_it_is_computed_no_more(make_backend):
    """Nodes are told of the end before they are asked to let go: they would keep it again."""

    async def play():
        backend = make_backend()
        backend.open = lambda request: SimpleNamespace(events=waits)
        looked = Looked(backend, pause=0.001)
        await looked.left()
        looked.warm("alice", [1])
        await looked.begin()
        await asyncio.wait_for(begun.wait(), 20)
        await looked.left()
        assert not ended, "nobody lets it go"
        looked.unpinned("alice", array("i", [1]), "")
        assert await looked.left() and ended
        await looked.end()

    async def waits():
        begun.set()
        try:
            await asyncio.sleep(20)
            yield
        finally:
            ended.append(True)

    begun, ended = asyncio.Event(), []
    asyncio.run(asyncio.wait_for(play(), 20))


def test_what_does_not_end_in_time_is_said(make_backend, monkeypatch):
    async def play():
        backend = make_backend()
        backend.open = lambda request: SimpleNamespace(events=stays)
        looked, turns = Looked(backend, pause=0.001), NextTurns(SimpleNamespace(idle=False), None)
        looked.warm("alice", [1])
        await looked.begin()
        staying = asyncio.create_task(stay())
        turns._tasks[staying] = Scheduling(tenant="alice")
        await asyncio.wait_for(begun.wait(), 20)
        for keeper in (looked, turns):
            keeper.unpinned(None, array("i"), "")
            assert not await keeper.left()
        over.set()
        assert await looked.left() and await turns.left()
        await looked.end()

    async def stay():
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await over.wait()

    async def stays():
        begun.set()
        await stay()
        yield

    monkeypatch.setattr(next_turns, "_LEAVES", 0.01)
    begun, over = asyncio.Event(), asyncio.Event()
    asyncio.run(asyncio.wait_for(play(), 20))
