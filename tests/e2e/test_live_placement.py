"""Placements that change while requests run, over real processes: nobody notices, and only the admin may ask for it."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from afserve.placement.optimizer.balance import balance
from afserve.placement.optimizer.problem import Nodes, Problem
from afserve.placement.placement import Placement
from afserve.placement.rebalance.record import decode
from tests.warm.interpreter import WARM

pytestmark = pytest.mark.process
TOPOLOGY = ("--attention", "2", "--experts", "3")
ADMIN = {"Authorization": "Bearer secret"}
CODE = ("import os\n", "def fibonacci(n):\n", "class Stack:\n    def push(self", "for i in range(10):\n")
TALK = ('"""Return the number of', "Please explain how", '"""Parse the given text and', "What does os.path")
TOKENS = 48
LAYERS, EXPERTS = 4, 32


@pytest.fixture
def keyed(tmp_path: Path) -> tuple[str, str]:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    return "--admin-key-file", str(keys)


def ask(server, prompt):
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


def texts(server):
    """Four at a time, first of one domain, then of the other. Any refusal is a failure."""
    with ThreadPoolExecutor(4) as several:
        answers = [*several.map(lambda p: ask(server, p), CODE), *several.map(lambda p: ask(server, p), TALK)]
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    return [answer.json()["choices"][0]["text"] for answer in answers]


def status(server):
    return httpx.get(f"{server.url}/status", headers=ADMIN).json()


def until(server, reached):
    """The status once it is as wanted; changes take some heartbeats."""
    for _ in range(600):
        found = status(server)
        if reached(found):
            return found
        time.sleep(0.05)
    raise AssertionError(found)


def shuffled(seed):
    """What suits some random load: 13 experts of each layer on each of three nodes at most."""
    load = np.random.default_rng(seed).lognormal(0, 1, (1, LAYERS, EXPERTS))
    return balance(Problem(load, Nodes((13, 13, 13)))).placement().to_json()


def in_rows(rows):
    """The same experts on every layer's nodes, replicas sharing evenly."""
    count = [sum(expert in row for row in rows) for expert in range(EXPERTS)]
    layer = {"slots": [list(row) for row in rows], "share": [[1 / count[e] for e in row] for row in rows]}
    return json.dumps({"nodes": len(rows), "layers": [layer] * LAYERS})


def apply(server, placement, headers=ADMIN):
    return httpx.post(
        f"{server.url}/admin/placement",
        content=placement,
        headers={"content-type": "application/json", **headers},
    )


def counted(found):
    """Routed rows per (layer, expert) over the attention nodes."""
    return np.array(found["routed"])


def generated(found):
    return sum(n["stats"]["generated_tokens"] for n in found["nodes"] if n["role"] == "attention")


def test_tokens_do_not_notice_placements_that_change_every_second(up, keyed, tmp_path):
    plain = up(*TOPOLOGY, "--rebalance", "off")
    expected = texts(plain)
    for answer in (apply(plain, "{}"), httpx.get(f"{plain.url}/admin/routing/dump", headers=ADMIN)):
        assert answer.status_code == 401 and "--admin-key-file" in answer.json()["error"]["message"]
    done = WARM.said("drain", "expert-0", "--url", plain.url)
    assert done.returncode == 2 and "--admin-key-file" in done.stderr
    assert plain.stop()[0] == 0

    recording = tmp_path / "counts.afroute"
    server = up(
        *TOPOLOGY, "--redundant-experts", "6", "--rebalance", "1", "--record-routing", str(recording), *keyed
    )
    passes = 0
    while passes < 4 or status(server)["epoch"] < 6:
        assert apply(server, shuffled(passes)).status_code == 202
        assert texts(server) == expected
        passes += 1
    made = passes * len(expected) * TOKENS
    found = until(server, lambda s: generated(s) == made)
    assert found["moves"] > 0
    assert len(found["balance"]) == LAYERS and all(1 <= b < 3 for b in found["balance"])
    assert any("asked to re-plan every 1 s" in decision for decision in found["decisions"])

    code, printed = server.stop()
    assert code == 0, printed
    recorded = decode(recording.read_bytes())
    assert (recorded.model, recorded.layers, recorded.experts) == ("nano", LAYERS, EXPERTS)
    assert np.array_equal(recorded.total_load(), counted(found))
    assert 0 < recorded.total_load(0).sum() < recorded.total_load().sum()


def test_the_admin_routes_change_and_record(up, keyed):
    server = up(
        "--attention", "1", "--experts", "3", "--redundant-experts", "6", "--rebalance", "off", *keyed
    )
    in_force = httpx.get(f"{server.url}/admin/placement", headers=ADMIN).text
    assert Placement.from_json(in_force).epoch == 0

    refused = {
        Placement.contiguous(layers=2, experts=8, nodes=3).to_json(): "of another model",
        Placement.contiguous(layers=LAYERS, experts=EXPERTS, nodes=4).to_json(): "for 4 expert nodes",
        in_rows([range(EXPERTS), (), ()]): "room for 13",
        '{"nodes": 3}': "not a placement file",
        '{"nodes": 3, "layers": 7}': "not a placement file",
        "slots": "JSON",
    }
    for body, reason in refused.items():
        answer = apply(server, body)
        assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text
    assert apply(server, in_force, headers={}).status_code == 401
    assert apply(server, in_force, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert status(server)["epoch"] == 0

    assert httpx.post(f"{server.url}/admin/routing/start", headers=ADMIN).status_code == 200
    assert apply(server, in_force).status_code == 202  # nothing to do
    one_more = in_rows([range(11), range(11, 22), (*range(22, EXPERTS), 0)])
    assert apply(server, one_more).status_code == 202
    found = until(server, lambda s: s["epoch"] == 1)
    assert (found["moves"], found["decisions"]) == (LAYERS, [])
    assert ask(server, CODE[0]).status_code == 200
    until(server, lambda s: generated(s) == TOKENS)
    dumped = httpx.get(f"{server.url}/admin/routing/dump", headers=ADMIN).content
    stopped = httpx.post(f"{server.url}/admin/routing/stop", headers=ADMIN).content
    assert dumped == stopped
    assert np.array_equal(decode(stopped).total_load(), counted(status(server)))
    assert server.stop()[0] == 0
