"""Keys beside one another: none learns what another has sent, throws out what it keeps, or keeps it from keeping."""

import asyncio

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.clock import FakeClock
from afserve.engine.kv.prefix_keys import keys_of
from afserve.engine.scheduling.request import MAX_SALT
from afserve.errors import CapacityError
from afserve.server.access.accounts import Account, Accounts
from afserve.server.access.fair_room import has_room, most_held
from afserve.server.access.key_file import Key
from afserve.server.access.keyring import Keyring
from afserve.server.batches.files import FILE_BYTES, FileStore
from afserve.server.batches.table import MAX_BATCHES, BatchTable
from afserve.server.bodies.declared import Scheduling
from afserve.server.endpoints.surfaces import ResponseStore, StoredResponse
from afserve.server.state.database import Database
from tests.server.stored import kept

ALICE, BOB = (Key(name, digit * 64) for name, digit in (("alice", "0"), ("bob", "1")))
SALTS = st.text(st.characters(codec="utf-8"), max_size=20)


def salt(key, asked="", **settings):
    account = Accounts(Keyring(), Database(), FakeClock(), **settings).account_for(key)
    return account.scheduled(Scheduling(cache_salt=asked)).cache_salt


@given(SALTS, SALTS)
def test_no_key_has_a_salt_of_another_whatever_it_asks_for(one, other):
    assert salt(ALICE, one) != salt(BOB, other)
    assert salt(ALICE, salt(BOB, other)) != salt(BOB, other)
    assert (salt(ALICE, one) == salt(ALICE, other)) == (one == other)
    assert len(salt(ALICE, one)) <= MAX_SALT


def test_without_keys_or_where_they_share_a_salt_is_what_was_asked_for():
    assert salt(None, "mine") == salt(ALICE, "mine", shares_prefixes=True) == "mine"
    assert Account().scheduled(Scheduling()) == Scheduling()
    assert salt(ALICE, "\ud800") == "\ud800", "which is refused"


def test_routes_by_cached_prompts_are_a_keys_own_too():
    prompt = range(256)
    alice, bob = (dict(keys_of(prompt, 16, salt(key))) for key in (ALICE, BOB))
    assert alice and not alice.keys() & bob.keys()


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 300)), max_size=80))
def test_nobody_fills_a_store_and_whoever_comes_has_as_much_as_is_left(asked):
    most, held = 1000, dict.fromkeys("abcde", 0)
    for owner, size in asked:
        if has_room(owner, held[owner], sum(held.values()), size, most):
            held[owner] += size
    free = most - sum(held.values())
    assert free >= max(held.values()) / 2**4 and free > 0
    assert has_room("e", 0, most - free, free / 2, most)


def test_one_alone_may_have_half_and_who_has_no_name_all():
    assert has_room("a", 0, 0, 50, 100) and not has_room("a", 0, 0, 51, 100)
    assert has_room("a", 40, 40, 10, 100) and not has_room("a", 40, 40, 11, 100)
    assert has_room("", 0, 60, 40, 100) and not has_room("", 0, 60, 41, 100)
    assert most_held([("b", 2), ("a", 1), ("a", 1)]) == "a"


@pytest.mark.parametrize("limits", [{"most": 20, "most_bytes": 1 << 20}, {"most": 1000, "most_bytes": 200}])
def test_a_flood_of_responses_throws_out_its_own(limits, run_async):
    async def check():
        database = Database()
        store = ResponseStore(database, FakeClock(), seconds=1000, **limits)
        for number in range(5):
            await store.put_response("alice", f"a{number}", StoredResponse(b"x" * 10, b"", b""))
        for number in range(100):
            await store.put_response("bob", f"b{number}", StoredResponse(b"x" * 10, b"", b""))
        assert len(await kept(store, "alice", [f"a{number}" for number in range(5)])) == 5
        bobs = await kept(store, "bob", [f"b{number}" for number in range(100)])
        assert bobs == [f"b{number}" for number in range(85, 100)]
        await store.put_response("bob", "large", StoredResponse(b"x" * 1000, b"", b""))
        assert await store.get_response("alice", "a0")
        await database.close_file()

    run_async(check())


def test_a_flood_of_files_leaves_room_for_others(run_async):
    async def check():
        database, size = Database(), 100 - FILE_BYTES % 100
        store = FileStore(database, FakeClock(), 100 * (size + FILE_BYTES), 1000.0, fair=True)
        with pytest.raises(CapacityError, match="files of this key hold"):
            for _ in range(100):
                await store.put_file("bob", "x", "batch", b"x" * size)
        assert len(await store.list_files("bob")) == 50
        for _ in range(25):
            await store.put_file("alice", "x", "batch", b"x" * size)
        with pytest.raises(CapacityError, match="as much as it leaves free"):
            await store.put_file("alice", "x", "batch", b"x" * size)
        assert await store.put_file("carol", "x", "batch", b"x" * size)
        for file in (await store.list_files("bob"))[:3]:
            await store.delete_file("bob", file.id)
        assert await store.put_file("alice", "x", "batch", b"x" * size)
        await database.close_file()

    run_async(check())


@pytest.mark.slow
def test_a_flood_of_batches_keeps_nobody_out(run_async):
    async def check():
        database, clock = Database(), FakeClock()
        table = BatchTable(database, clock, FileStore(database, clock, 1 << 20, 1000.0, fair=True), "one")

        async def create(owner):
            return await table.create(owner, "/v1/completions", "file-1", 1, {})

        early = await create("alice")
        await table.end_batch(early.id, "completed")
        with pytest.raises(CapacityError, match="batches of this key are running"):
            for _ in range(MAX_BATCHES):
                await create("bob")
        assert len(await table.list_batches("bob")) == MAX_BATCHES // 2
        for row in await table.list_batches("bob"):
            await table.end_batch(row.id, "completed")
        for _ in range(MAX_BATCHES // 2 + 20):
            await table.end_batch((await create("bob")).id, "completed")
        assert [row.id for row in await table.list_batches("alice")] == [early.id], "those of bob made room"
        assert await create("alice")
        await database.close_file()

    run_async(check())


@pytest.fixture
def run_async():
    return asyncio.run


ASKED = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 1, "resume": 60}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 16}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ("/v1/embeddings", {"input": "x"}),
    ("/api/generate", {"prompt": "x", "stream": False}),
    ("/api/chat", {"messages": [{"role": "user", "content": "x"}], "stream": False}),
]


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_every_way_to_ask_is_salted_by_its_key(path, body, make_backend, run_server):
    salts = []
    with run_server(make_backend(), api_keys=("a", "b")) as server:
        for key in ("a", "b", "a"):
            sent = {"model": "tiny", **body}
            answer = httpx.post(server.url + path, json=sent, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            salts.append(server.backend.requests[-1].cache_salt)
    assert len({*salts}) == 2 and salts[0] == salts[2] and all(salts)


@pytest.mark.parametrize("settings", [{}, {"api_keys": ("a", "b"), "share_prefixes": True}])
def test_without_keys_or_where_it_was_asked_for_nothing_is_salted(settings, make_backend, run_server):
    with run_server(make_backend(), **settings) as server:
        httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "x"}, headers={"authorization": "Bearer a"}
        ).raise_for_status()
        assert server.backend.requests[-1].cache_salt == ""


@pytest.mark.slow
def test_kept_requests_of_one_key_make_no_room_for_anothers(make_backend, run_server):
    """Its own go, or it is told to wait."""

    def ask(http, key):
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "resume": 60}
        return http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

    def known(http, key, id):
        return http.get(f"/v1/requests/{id}", headers={"authorization": f"Bearer {key}"}).status_code == 200

    with (
        run_server(make_backend(), api_keys=("a", "b"), resume_requests=8) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        first = ask(http, "a").json()["id"]
        flood = [ask(http, "b").json()["id"] for _ in range(20)]
        assert known(http, "a", first) and ask(http, "a").status_code == 200
        assert [known(http, "b", id) for id in flood] == [False] * 17 + [True] * 3
    with run_server(make_backend(), resume_requests=8) as server, httpx.Client(base_url=server.url) as http:
        made_up = [ask(http, f"{number}").json()["id"] for number in range(9)]
        assert [known(http, f"{number}", id) for number, id in enumerate(made_up)] == [False] + [True] * 8
