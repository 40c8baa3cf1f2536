"""`afserve up` as a user has it: real processes, real sockets, every way of ending."""

import json
import os
import re
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from afserve.launch.plan.models import CONFIGS
from tests.arrows import backwards
from tests.e2e.streams import ENDLESS, begun, texts
from tests.warm.interpreter import WARM

pytestmark = pytest.mark.process
ASK = {"model": "nano", "prompt": "import os\n", "max_tokens": 12, "temperature": 0}
LONG = {**ENDLESS, "model": "nano", "prompt": "def f("}


def complete(server, **changes):
    return httpx.post(f"{server.url}/v1/completions", json={**ASK, **changes}, timeout=120)


def test_serves_and_ends_on_ctrl_c(up):
    server = up("--attention", "1", "--experts", "2", "--micro-batches", "2", cold=True)
    answer = complete(server).json()
    assert answer["usage"]["completion_tokens"] == 12
    assert set(server.status()) == {"attention-0", "expert-0", "expert-1"}
    assert psutil.Process(server.process.pid).memory_info().rss < 200 << 20
    code, printed = server.stop(signal.SIGINT)
    assert code == 0
    assert f"curl {server.url}/v1/completions" in printed and "experts 16-31" in printed


def test_a_node_on_two_devices_answers_as_on_one(up, shared_up, undisturbed):
    expected = undisturbed(shared_up().url)
    server = up("--attention", "1", "--experts", "2", "--tensor-parallel", "2")
    assert texts(begun(server.url)) == expected
    assert re.search(
        r"^afserve_attention_devices\{.*\} 2", httpx.get(f"{server.url}/metrics").text, re.MULTILINE
    )


@pytest.mark.alone
def test_second_ctrl_c_ends_at_once_while_a_request_runs(up):
    server = up()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
    assert "shutting down" in rest[-2] and rest[-1] == "data: [DONE]"
    code, _ = server.wait()
    assert code == 130


@pytest.mark.alone
def test_sigterm_under_load_ends_before_docker_kills(up):
    server = up("--text-processes", "1")
    body = json.dumps(LONG).encode()
    ask = (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    clients = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(16)]
    for client in clients:
        client.sendall(ask)
    assert clients[0].recv(1) == b"H"
    assert server.stop(signal.SIGTERM)[0] == 0
    rests = []
    for client in clients:
        with client, client.makefile("rb") as rest, suppress(ConnectionResetError):  # by who ends
            rests.append(rest.read())
    assert any(b"shutting down" in rest for rest in rests), "their ends were not waited for"


def test_a_template_without_end_is_refused_at_the_start(tmp_path: Path):
    folder = tmp_path / "bomb"
    shutil.copytree(CONFIGS / "nano", folder)
    (folder / "chat_template.jinja").write_text("{{ 'a' * 2000000000 }}")
    code, said = run_up("--model", str(folder), "--port", "0")
    assert code == 2 and "chat template" in said and "1024 MiB" in said, said


def test_client_gone_frees_its_blocks(shared_up):
    server = shared_up()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as answer:
        next(answer.iter_lines())
    until = time.monotonic() + 30
    while time.monotonic() < until:
        node = httpx.get(f"{server.url}/status").json()["nodes"][0]
        if node["stats"]["running"] == 0 and node["stats"]["generated_tokens"] > 0:
            return
        time.sleep(0.1)
    raise AssertionError(node)


def test_sigterm_lets_a_running_request_finish(shared_up):
    server = shared_up()
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={**ASK, "stream": True, "max_tokens": 64, "ignore_eos": True},
        timeout=60,
    ) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert first.startswith("data: ") and rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.wait()[0] == 0


@pytest.mark.parametrize("name", ["attention-0", "expert-1"])
def test_a_killed_node_ends_the_run_and_is_named(up, name):
    server = up("--attention", "1", "--experts", "2", "--on-loss", "end")
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(server.status()[name], signal.SIGKILL)
        rest = [line for line in lines if line]
    code, printed = server.wait()
    assert code == 1
    assert f"error: {name}" in printed and "SIGKILL" in printed
    assert any("error" in line and name in line for line in rest)  # the client was told, not dropped


def test_a_killed_gateway_leaves_nothing(up):
    server = up("--attention", "1", "--experts", "2")
    assert server.stop(signal.SIGKILL)[0] == -signal.SIGKILL


def test_a_stopped_start_leaves_nothing(up):
    server = up(ready=False)
    time.sleep(1.0)
    family = server.family() if server.process.poll() is None else []
    code, _ = server.stop(signal.SIGTERM)
    assert code in (0, -signal.SIGTERM)
    assert not psutil.wait_procs(family, timeout=15)[1]


def run_up(*flags: str) -> tuple[int, str]:
    done = WARM.said("up", *flags)
    return done.returncode, done.stderr


def test_a_busy_port_is_said_at_once():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        code, said = run_up("--port", str(port))
    assert code == 2
    assert said.startswith("error: ") and str(port) in said and said.count("\n") == 1


def test_a_corrupt_shard_is_named(tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(CONFIGS / "nano", broken)
    with open(broken / "model.safetensors", "r+b") as file:
        file.truncate(1 << 20)
    code, said = run_up("--model", str(broken), "--port", "0")
    assert code == 2, said
    assert "model.safetensors" in said


def test_a_model_that_does_not_fit_says_what_to_do(refused):
    code, said = refused("--model", "deepseek-v3")
    assert code == 2
    for wanted in (
        "attention node",
        "per 1,000 tokens",
        "this machine" if "this machine" in said else "here",
        "nano",
        "--load-format dummy",
        "afserve plan",
    ):
        assert wanted in said


def test_dummy_weights_of_a_known_shape_are_served(up, tmp_path: Path):
    config = json.loads((CONFIGS / "nano" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
    server = up(
        "--model", str(tmp_path), "--load-format", "dummy", "--layers", "3", "--served-model-name", "noise"
    )
    assert complete(server, model="noise", ignore_eos=True).json()["usage"]["completion_tokens"] == 12


def test_eight_bits_from_a_file_are_said_and_served(up, tmp_path: Path):
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    settings = 'expert-dtype = "int8"\nwire-dtype = "fp8"\nblock-size = 32\nprefix-caching = false\nmax-waiting = 9\n'
    (tmp_path / "up.toml").write_text(settings)
    server = up("--config", str(tmp_path / "up.toml"), "--attention", "1", "--experts", "2")
    texts = [complete(server).json()["choices"][0]["text"] for _ in range(2)]
    assert texts[0] == texts[1] and texts[0].strip()
    _, printed = server.stop(signal.SIGINT)
    assert "int8 weights" in printed and "rows in fp8" in printed


def test_a_trace_shows_every_node_and_every_row_on_its_way(up, tmp_path):
    out = tmp_path / "trace.json"
    server = up("--attention", "2", "--experts", "3", "--micro-batches", "2", "--trace", str(out))

    def ask(number):
        body = {"prompt": f"import os  # {number}", "max_tokens": 24, "ignore_eos": True}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code

    with ThreadPoolExecutor(12) as clients:  # five busy processes on however few cores there are
        assert set(clients.map(ask, range(36))) == {200}
    server.stop(signal.SIGINT)
    assert backwards(out) == []
    events = json.loads(out.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"gateway", "attention-0", "attention-1", "expert-0", "expert-1", "expert-2"}
    drawn = {e["name"] for e in events if e["ph"] == "X"}
    assert {"schedule", "sample", "attend", "wait for the first token", "stream"} <= drawn
    sent, computed, added = ({e["id"] for e in events if e["ph"] == kind} for kind in "stf")
    assert sent and sent == computed == added
