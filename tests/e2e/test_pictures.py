"""Chats with pictures over real processes: the tokens of transformers, from prefill nodes too, and after a loss."""

import json
import os
import signal
import threading

import httpx
import pytest

from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.server.bodies.fields import Fields
from afserve.server.text.pictures import PictureReader
from afserve.tokens.tokenizer import Tokenizer
from tests.e2e.conftest import DEADLINE
from tests.families.pictures import SIGHTS, build_talking, data_url

pytestmark = pytest.mark.process
NEW = 160


def body(*urls, **more):
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    said = [{"type": "text", "text": "import "}, *pictures, {"type": "text", "text": "x = 1"}]
    asked = {"messages": [{"role": "user", "content": said}], "max_tokens": NEW, "temperature": 0}
    return asked | {"ignore_eos": True, "skip_special_tokens": False} | more


class Streamed(threading.Thread):
    """The words of a chat, as they come."""

    def __init__(self, up, asked):
        super().__init__(daemon=True)
        self.up, self.asked, self.text, self.begun = up, asked, "", threading.Event()

    def run(self):
        url = f"{self.up.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=self.asked | {"stream": True}, timeout=DEADLINE) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    told = json.loads(line[6:])
                    assert "error" not in told, told
                    self.text += told["choices"][0]["delta"].get("content") or ""
                    if self.text:
                        self.begun.set()


def answer(up, asked):
    told = httpx.post(f"{up.url}/v1/chat/completions", json=asked, timeout=DEADLINE).json()
    return told["choices"][0]["message"]["content"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def by_transformers(sight, folder, up, asked, urls, said):
    """The words; the engine's own are guessed."""
    tokenizer = Tokenizer.from_folder(folder)
    ids = httpx.post(f"{up.url}/tokenize", json=asked, timeout=DEADLINE).json()["tokens"]
    reader = PictureReader.from_folder(str(folder), tokenizer)
    pictures = reader.read_pictures(
        [Fields({"type": "image_url", "image_url": {"url": url}}) for url in urls]
    )
    params = SamplingParams(max_tokens=NEW, temperature=0)
    request = GenerationRequest(0, tuple(ids), params, tiles=reader.locate(ids, pictures))
    guess = tokenizer.encode(said, add_special_tokens=False)
    return tokenizer.decode(SIGHTS[sight].seeing(folder).continued(request, guess), skip_special_tokens=False)


@pytest.mark.parametrize("sight", ["llama4", pytest.param("qwen3_5", marks=pytest.mark.long)])
def test_a_kill_in_mid_stream_and_a_cache(sight, tmp_path, up):
    folder = build_talking(tmp_path, sight)
    one, two = data_url(37, 61), data_url(10, 9, seed=1, kind="JPEG")
    other = data_url(37, 61, seed=2)
    asked = [body(one), body(other, two)]
    server = up("--model", str(folder), "--attention", "2", "--experts", "1", "--threads", "1")
    undisturbed = [answer(server, each)[0] for each in asked]
    assert undisturbed[0] == by_transformers(sight, folder, server, asked[0], [one], undisturbed[0])
    assert undisturbed[1] == by_transformers(sight, folder, server, asked[1], [other, two], undisturbed[1])
    again, cached = answer(server, asked[0])
    assert again == undisturbed[0] and cached >= 32, "the same picture is found"
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body("https://a.example/b.png"))
    assert refused.status_code == 400 and "nothing is fetched" in refused.text
    streams = [Streamed(server, each) for each in asked * 2]
    for stream in streams:
        stream.start()
    for stream in streams:
        assert stream.begun.wait(DEADLINE)
    os.kill(server.status()["attention-0"], signal.SIGKILL)
    for stream in streams:
        stream.join(DEADLINE)
    assert [stream.text for stream in streams] == undisturbed * 2
    assert server.stop()[0] == 0


def test_prefill_nodes_see_what_decode_nodes_are_asked(tmp_path, up):
    folder, url = build_talking(tmp_path, "qwen3_5"), data_url(37, 61)
    flags = ("--prefill", "1", "--decode", "1", "--experts", "1", "--threads", "1", "--straight-tokens", "0")
    server = up("--model", str(folder), *flags)
    said, _ = answer(server, body(url))
    assert said == by_transformers("qwen3_5", folder, server, body(url), [url], said)
    nodes = httpx.get(f"{server.url}/status", timeout=DEADLINE).json()["nodes"]
    kv = [node["stats"]["kv"] for node in nodes if node["role"] == "attention"]
    assert sum(one["handed"] for one in kv) == 1 and not sum(one["handed_short"] for one in kv)
    assert server.stop()[0] == 0
