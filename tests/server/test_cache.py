"""/v1/cache over a real engine: what each key keeps, what it costs, and that nobody unpins what is another's."""

import asyncio
import json
from array import array
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest

from afserve import Client
from afserve.control.backend import CacheKept
from afserve.control.wire.view_values import ClusterView, NodeView
from afserve.engine.stats import AttentionStats, HostStats, TierStats
from afserve.server.access.key_file import KeyLimits, KeyRole, add_key
from afserve.server.endpoints import cache
from afserve.server.http.settings import ServerSettings
from afserve.tokens.tokenizer import Tokenizer
from tests.server.conftest import Server
from tests.server.nano import FOLDER, NanoBackend

PROMPT = "os.path.join joins two or more pathname components, inserting slashes as needed. " * 8
BLOCK, BLOCKS = 16, 256


class Asker:
    """One key's client."""

    def __init__(self, url, key=""):
        self.http = httpx.Client(
            base_url=url, timeout=20, headers={"authorization": f"Bearer {key}"} if key else {}
        )

    def warm(self, prompt=PROMPT):
        said = self.http.post("/v1/cache/warm", json={"prompt": prompt, "retain": 600})
        assert said.status_code == 200, said.text
        return said.json()["usage"]

    def kept(self, **query):
        return self.http.get("/v1/cache", params=query).json()

    def unpin(self, **query):
        return self.http.delete("/v1/cache", params=query).json()


async def no_nodes():
    return ClusterView(0, (), {})


@pytest.fixture(scope="module")
def askers(tmp_path_factory):
    """Alice, Bob, and an administrator, over one engine."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    roles = {"alice": KeyRole.USER, "bob": KeyRole.USER, "root": KeyRole.ADMIN}
    secrets = {name: add_key(file, name, role, KeyLimits()) for name, role in roles.items()}
    backend = NanoBackend()
    backend.view = no_nodes
    server = Server(backend, Tokenizer.from_folder(FOLDER), ServerSettings(keys_file=str(file)))
    server.start()
    each = [Asker(server.url, secret) for secret in secrets.values()]
    try:
        yield each
    finally:
        for one in each:
            one.http.close()
        server.stop()


@pytest.fixture(autouse=True)
def nothing_kept(askers):
    askers[2].unpin()


@pytest.mark.slow
def test_a_key_sees_what_it_keeps_and_what_that_takes(askers):
    alice, bob, root = askers
    tokens = alice.warm()["prompt_tokens"]
    kept = alice.kept()
    assert kept["object"] == "cache" and kept["complete"] and "tiers" not in kept
    (row,) = kept["kept"]
    blocks = tokens // BLOCK
    assert row["key"] == "alice" and row["blocks"] == blocks and row["tokens"] == blocks * BLOCK
    assert row["share"] == round(blocks / BLOCKS, 6) and row["bytes"] > 0 and 500 < row["seconds"] <= 600
    assert bob.kept()["kept"] == []
    bob.warm()
    assert [row["key"] for row in root.kept()["kept"]] == ["alice", "bob"]
    assert [row["key"] for row in root.kept(key="bob")["kept"]] == ["bob"]
    assert [row["key"] for row in alice.kept()["kept"]] == ["alice"]


def test_a_key_unpins_its_own_alone(askers):
    alice, bob, root = askers
    blocks = alice.warm()["prompt_tokens"] // BLOCK
    bob.warm()
    assert bob.unpin() == {
        "object": "cache", "unpinned": {"blocks": blocks, "tokens": blocks * BLOCK}, "complete": True,
    }  # fmt: skip
    assert bob.unpin()["unpinned"]["blocks"] == 0 and len(alice.kept()["kept"]) == 1
    for verb in ("GET", "DELETE"):
        refused = bob.http.request(verb, "/v1/cache", params={"key": "alice"})
        assert refused.status_code == 403 and "another key's" in refused.json()["error"]["message"]
    assert root.unpin(key="alice")["unpinned"]["blocks"] == blocks and not root.kept()["kept"]
    assert alice.warm()["cached_tokens"] == blocks * BLOCK, "it stays until its room is needed"


def test_one_prompt_is_let_go_and_others_stay(askers):
    alice, bob, _ = askers
    other = "The second prompt has other words from its beginning on. " * 8
    first, second = (alice.warm(words)["prompt_tokens"] // BLOCK for words in (PROMPT, other))
    bob.warm()

    def unpin(asker):
        said = asker.http.post("/v1/cache/unpin", json={"prompt": PROMPT})
        assert said.status_code == 200, said.text
        return said.json()["unpinned"]["blocks"]

    assert unpin(alice) == first and unpin(alice) == 0
    assert alice.kept()["kept"][0]["blocks"] == second and len(bob.kept()["kept"]) == 1
    assert alice.warm()["cached_tokens"] == first * BLOCK
    refused = alice.http.post("/v1/cache/unpin", json={})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"


def test_who_sees_all_says_whose_prompt_is_let_go(askers):
    alice, bob, root = askers
    blocks = [asker.warm()["prompt_tokens"] // BLOCK for asker in (alice, bob, root)]

    def unpin(**query):
        return root.http.post("/v1/cache/unpin", json={"prompt": PROMPT}, params=query)

    for query, told in (({}, "?key=root for your own"), ({"key": "carol"}, "'carol' is no key")):
        refused = unpin(**query)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "key"
        assert told in refused.json()["error"]["message"]
    assert unpin(key="alice").json()["unpinned"]["blocks"] == blocks[0]
    assert [row["key"] for row in root.kept()["kept"]] == ["bob", "root"]
    secret = root.http.headers["authorization"].removeprefix("Bearer ")
    with Client(str(root.http.base_url), api_key=secret) as client:
        assert client.unpin_prompt({"prompt": PROMPT}, key="root")["unpinned"]["blocks"] == blocks[2]
    assert bob.http.post("/v1/cache/unpin", json={"prompt": PROMPT}).json()["unpinned"]["blocks"] == blocks[1]


def test_who_may_ask_and_for_what(askers):
    alice, _, _ = askers
    assert httpx.get(f"{alice.http.base_url}/v1/cache").status_code == 401
    assert alice.http.get("/v1/cache", params={"model": "other"}).status_code == 404
    assert alice.http.get("/v1/cache", params={"model": "nano"}).status_code == 200
    assert alice.http.put("/v1/cache").status_code == 405


def test_our_client_asks_too_and_tiers_are_told_where_there_are_any(make_backend, run_server):
    tiers = TierStats(blocks=3, capacity=9, host=HostStats(blocks=2, capacity=4))
    node = NodeView("attention-0", "attention", "ready", 1, 0.0, 0, replace(AttentionStats(), tiers=tiers))
    backend = make_backend(nodes=(node,))
    asked = []

    async def kept_cache(owner, *, unpin, prompt, salt):
        asked.append((owner, unpin))
        return CacheKept((), complete=False)

    backend.kept_cache = kept_cache
    with run_server(backend) as server, Client(server.url) as client:
        said = json.loads(json.dumps(client.kept_cache()))
        assert [(row["tier"], row["blocks"], row["capacity"]) for row in said["tiers"]] == [
            ("host", 2, 4),
            ("disk", 3, 9),
        ]
        assert not said["complete"] and client.unpin_cache()["unpinned"] == {"blocks": 0, "tokens": 0}
    assert asked == [(None, False), (None, True)]


def test_what_is_computed_still_is_not_let_go_completely():
    """All who look after prompts are told of all of them before anybody is waited for."""
    told = []

    def keeper(ends):
        async def left():
            told.append("waits")
            return ends

        return SimpleNamespace(left=left, unpinned=lambda owner, prompt, salt: told.append(prompt[0]))

    async def kept_cache(owner, *, unpin, prompt, salt):
        return CacheKept((), complete=True)

    def complete(*keepers):
        model = SimpleNamespace(
            keeping_warm=[keeper(ends) for ends in keepers],
            backend=SimpleNamespace(kept_cache=kept_cache),
            model_name="nano",
        )
        found = asyncio.run(cache._unpin(model, None, (array("i", [1]), array("i", [2]))))
        return [kept.complete for _, kept in found]

    assert complete(True, False) == [False, False] and told == [1, 2, 1, 2, "waits", "waits"]
    assert complete(True, True) == [True, True]
