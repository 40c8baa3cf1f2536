"""Gateways get new processes one after another under an open-loop load: no request fails, whoever asks and however."""

import random
import threading
import time

import httpx
import pytest
from openai import OpenAI

from tests.e2e.streams import ENDLESS, wait

pytestmark = pytest.mark.process
KEY = "an-admin-key"
ASK = {"prompt": "import os\n", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
EVERY = 0.08  # seconds between two requests, on average


class Load:
    """Requests come when their time has come, whatever became of those before. `failures` in words."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
        self.openai = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)
        self.answers: list[str] = []
        self.failures: list[str] = []
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self.arrivals)]

    def arrivals(self) -> None:
        dice = random.Random(3)
        ways = (self.plain, self.streamed, self.by_httpx)
        while not self.over.wait(dice.expovariate(1 / EVERY)):
            self.threads.append(threading.Thread(target=self.one, args=(dice.choice(ways),)))
            self.threads[-1].start()

    def one(self, way) -> None:
        try:
            self.answers.append(way())
        except Exception as error:  # noqa: BLE001  whatever a client may be told
            self.failures.append(f"{way.__name__}: {type(error).__name__}: {error}")

    def plain(self) -> str:
        return self.openai.completions.create(model="nano", **ASK).choices[0].text

    def streamed(self) -> str:
        parts = self.openai.completions.create(model="nano", stream=True, **ASK)
        return "".join(part.choices[0].text for part in parts)

    def by_httpx(self) -> str:
        body = {k: v for k, v in ASK.items() if k != "extra_body"} | {"ignore_eos": True}
        answer = self.http.post("/v1/completions", json=body)
        answer.raise_for_status()
        return answer.json()["choices"][0]["text"]

    def __enter__(self) -> "Load":
        self.threads[0].start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(60)
        self.http.close()
        self.openai.close()


def test_a_gateway_that_was_started_anew_knows_where_conversations_are(up, tmp_path):
    """The second prompt was computed by the second node, since the first one was busy: nobody but that node knows."""
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    server = up("--attention", "2", "--experts", "1", "--gateways", "1", "--admin-key-file", str(keys))
    client = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
    texts = ["import os\n" * 200, "class Tree:\n    pass\n" * 100]

    def ask(text: str, tokens: int) -> dict:
        body = {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return client.post("/v1/completions", json=body).raise_for_status().json()["usage"]

    def gateway() -> int:
        (found,) = [
            node["pid"] for node in client.get("/status").json()["nodes"] if node["role"] == "gateway"
        ]
        return found

    body = {**ENDLESS, "prompt": texts[0], "max_tokens": 400}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        ask(texts[1], 4)
        assert "data: [DONE]" in list(lines)
    before = gateway()
    client.post("/admin/restart", json={"nodes": ["gateway-0"]}).raise_for_status()
    wait(lambda: gateway() != before)
    for text in texts:
        usage = ask(text, 1)
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * usage["prompt_tokens"]
    client.close()
    assert server.stop()[0] == 0


@pytest.mark.parametrize("gateways", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_rolling_restart_of_gateways_fails_no_request(up, tmp_path, gateways):
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    flags = ("--gateways", str(gateways), "--admin-key-file", str(keys))
    server = up("--experts", "2", *flags)
    admin = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60)

    def processes() -> dict[str, int]:
        nodes = admin.get("/status").json()["nodes"]
        return {node["name"]: node["pid"] for node in nodes if node["role"] == "gateway"}

    before = processes()
    with Load(server.url) as load:
        wait(lambda: len(load.answers) > 10)
        names = [f"gateway-{index}" for index in range(gateways)]
        admin.post("/admin/restart", json={"nodes": names}).raise_for_status()
        wait(lambda: not set(processes().values()) & set(before.values()) and len(processes()) == gateways)
        more = len(load.answers) + 10
        wait(lambda: len(load.answers) > more)
        time.sleep(0.2)
    admin.close()
    assert load.failures == []
    assert len(set(load.answers)) == 1, "greedy answers are the same"
    assert server.stop()[0] == 0
