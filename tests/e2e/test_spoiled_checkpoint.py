"""A checkpoint with one bad value, over real processes: the request that meets it is told so, all others are served."""

import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from safetensors.torch import load_file, save_file

from afserve import LLM, SamplingParams
from afserve.launch.plan.models import CONFIGS
from afserve.tokens.tokenizer import Tokenizer

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm_fork_servers")]
GOOD, BAD = "def main():\n", "\u2603"  # a snowman, which nobody writes in the answers below
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """nano with NaN in the embedding of a token that BAD holds and GOOD does not."""
    folder = tmp_path_factory.mktemp("spoiled") / "nano"
    shutil.copytree(CONFIGS / "nano", folder)
    tokenizer = Tokenizer.from_folder(folder)
    token = next(t for t in tokenizer.encode(BAD) if t not in tokenizer.encode(GOOD))
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].clone()
    embedding[token] = math.nan
    save_file({**tensors, "model.embed_tokens.weight": embedding}, folder / "model.safetensors")
    return folder


def test_from_python_one_continuation_ends_and_the_others_go_on(spoiled):
    with LLM(str(spoiled), attention=2, experts=2) as llm:
        alone = llm.generate(GOOD, GREEDY)[0]
        outs = llm.generate([GOOD, BAD] * 4, GREEDY)
        again = llm.generate(GOOD, GREEDY)[0]
    assert alone.finish_reason == "length" and alone.error is None
    for out in (*outs[::2], again):
        assert out.token_ids == alone.token_ids
    for out in outs[1::2]:
        assert out.finish_reason == "error" and out.token_ids == ()
        assert out.error.startswith("layer 0 gave values that are not finite")


def test_over_http_it_is_a_500_and_a_stream_beside_it_does_not_notice(shared_up, spoiled):
    server = shared_up("--model", str(spoiled), "--experts", "2")
    ask = {"prompt": GOOD, "max_tokens": 200, "temperature": 0, "ignore_eos": True}

    def good():
        return httpx.post(f"{server.url}/v1/completions", json=ask, timeout=60).json()["choices"][0]["text"]

    expected = good()
    with ThreadPoolExecutor(4) as clients:
        beside = [clients.submit(good) for _ in range(4)]
        for fields in ({}, {"stream": True}, {"n": 3, "seed": 1, "temperature": 1.0}, {"logprobs": 3}):
            reply = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": BAD, "max_tokens": 4, **fields}, timeout=60
            )
            error = json.loads(reply.text)["error"]
            assert reply.status_code == 500 and error["type"] == "model_error"
            assert "layer 0 gave values that are not finite" in error["message"]
        assert {future.result() for future in beside} == {expected}
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_the_numbers_that_ended_a_run(shared_up, spoiled):
    """One request of 60 bytes with a temperature of 1e-40 ended every stream."""
    server = shared_up("--model", str(spoiled), "--experts", "2")
    for fields in (
        {"temperature": 1e-40},
        {"temperature": 1e-38},
        {"temperature": 1e-320},
        {"temperature": 1, "top_p": 1e-46},
        {"temperature": 1, "top_p": 5e-324},
        {"repetition_penalty": 1e-44},
        {"temperature": 1, "min_p": 1.0, "top_k": 1},
    ):
        body = {"prompt": "def main():", "max_tokens": 4, **fields}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        expected = 400 if "repetition_penalty" in fields else 200
        assert reply.status_code == expected, (fields, reply.text)
    assert httpx.get(f"{server.url}/ready").status_code == 200
