"""`afserve up --models FILE`: two models with nodes of their own behind one gateway; one is lost and comes back."""

import json
import time

import httpx
import psutil
import pytest

pytestmark = pytest.mark.process
FILE = """
[[model]]
name = "split"
model = "nano"
attention = 1
experts = 2
kv-tokens = 4096

[[model]]
name = ["whole", "w"]
model = "nano"
colocated = true
kv-tokens = 2048
"""


def answer(url, model):
    body = {"model": model, "prompt": "def main():", "max_tokens": 6, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_two_models_and_one_is_lost_and_comes_back(up, tmp_path):
    file = tmp_path / "models.toml"
    file.write_text(FILE)
    server = up("--models", str(file))
    assert [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]] == [
        "split",
        "whole",
        "w",
    ]
    answers = {model: answer(server.url, model).json() for model in ("split", "whole", "w")}
    assert [body["model"] for body in answers.values()] == ["split", "whole", "whole"]
    assert len({body["choices"][0]["text"] for body in answers.values()}) == 1
    assert answer(server.url, "nano").status_code == 404
    nodes = {
        model: {node["name"] for node in httpx.get(f"{server.url}/status?model={model}").json()["nodes"]}
        for model in ("split", "whole")
    }
    assert nodes == {"split": {"attention-0", "expert-0", "expert-1"}, "whole": {"attention-0"}}

    first, second = server.fork_servers()
    (pid,) = (n["pid"] for n in httpx.get(f"{server.url}/status?model=whole").json()["nodes"])
    second.kill()
    psutil.Process(pid).kill()
    until = time.monotonic() + 60
    while second in server.fork_servers() or len(server.fork_servers()) < 2:
        assert answer(server.url, "split").json()["choices"] == answers["split"]["choices"]
        assert time.monotonic() < until
    server.wait_ready()
    assert answer(server.url, "whole").json()["choices"] == answers["whole"]["choices"]
    assert first in server.fork_servers(), "each model has its own"
    code, printed = server.stop()
    assert code == 0 and "another one starts, nodes go on" in printed


def test_each_model_is_traced_in_a_file_of_its_own(up, tmp_path):
    file, trace = tmp_path / "models.toml", tmp_path / "run.json"
    file.write_text(FILE)
    server = up("--models", str(file), "--trace", str(trace))
    assert all(answer(server.url, model).status_code == 200 for model in ("split", "whole"))
    code, printed = server.stop()
    assert code == 0, printed
    found = {}
    for model in ("split", "whole"):
        events = json.loads((tmp_path / f"run.{model}.json").read_text())["traceEvents"]
        found[model] = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert found == {
        "split": {"attention-0", "expert-0", "expert-1", "gateway"},
        "whole": {"attention-0", "gateway"},
    }
    assert not trace.exists() and f"run.{model}.json" in printed.replace("\n", "")


def test_a_model_that_nobody_asks_sleeps_until_somebody_does(up, tmp_path):
    file = tmp_path / "models.toml"
    file.write_text(FILE)
    server = up("--models", str(file), "--pilot", "act", "--pilot-idle", "2")
    before = answer(server.url, "whole").json()["choices"]
    until = time.monotonic() + 60
    while httpx.get(f"{server.url}/status?model=whole").json()["nodes"]:
        assert time.monotonic() < until
        answer(server.url, "split")  # which is asked, and stays
        time.sleep(0.2)
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert len(httpx.get(f"{server.url}/status?model=split").json()["nodes"]) == 3
    again = answer(server.url, "whole")
    assert again.status_code == 200 and again.json()["choices"] == before
    code, printed = server.stop()
    assert code == 0 and "whole: nobody asks for it" in printed and "serves again" in printed
