"""`up --gateways N`: HTTP in processes of its own that share one port; what they serve and how they end."""

import json
import os
import signal
import threading
import time

import httpx
import psutil
import pytest

from tests.e2e.ports import free_port
from tests.e2e.streams import ENDLESS
from tests.warm.interpreter import WARM

pytestmark = pytest.mark.process
ASK = {"prompt": "import os\n", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def texts(server, count):
    """One connection each, at the same time."""
    found = []

    def ask():
        answer = httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=60)
        found.append((answer.status_code, answer.json()["choices"][0]["text"]))

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


class Stream(threading.Thread):
    def __init__(self, url):
        super().__init__(daemon=True)
        self.url, self.pieces, self.error, self.ended = url, 0, "", False

    def run(self):
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json={**ENDLESS, "prompt": ASK["prompt"]}, timeout=60
        ) as answer:
            for line in answer.iter_lines():
                self.ended = self.ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    self.pieces += 1
                    self.error = self.error or str(json.loads(line[6:]).get("error", ""))

    def begun(self):
        self.start()
        until = time.monotonic() + 30
        while self.pieces < 3:
            assert time.monotonic() < until and self.is_alive()
            time.sleep(0.005)
        return self


def test_processes_share_the_port_and_serve_the_same_text(up, undisturbed):
    server = up("--attention", "2", "--experts", "2", "--gateways", "2")
    assert set(server.status()) == {*(f"{r}-{i}" for r in ("attention", "expert", "gateway") for i in (0, 1))}
    longer = undisturbed(server.url)[
        ASK["prompt"]
    ]  # test_losses compares it with deployments without gateways
    ((code, expected),) = texts(server, 1)
    assert code == 200 and expected and longer.startswith(expected)
    assert texts(server, 24) == [(200, expected)] * 24
    assert server.stop()[0] == 0


def test_what_the_controller_knows_is_asked_of_it(up, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("an-admin-key\n")
    keys.chmod(0o600)
    server = up("--experts", "2", "--gateways", "1", "--admin-key-file", str(keys))
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer an-admin-key"}) as admin:
        assert [node["role"] for node in admin.get("/status").json()["nodes"]] == [
            "attention",
            "expert",
            "expert",
            "gateway",
        ]
        assert 'afserve_node_up{model_name="nano",node="gateway-0"' in admin.get("/metrics").text
        placement = admin.get("/admin/placement").json()
        assert placement["nodes"] == 2
        assert admin.post("/admin/routing/start").status_code == 200
        texts(server, 2)
        time.sleep(1.5)  # counts travel once a second
        assert len(admin.get("/admin/routing/dump").content) > 100
        assert len(admin.post("/admin/routing/stop").content) > 100
        wrong = admin.post("/admin/placement", json={**placement, "layers": placement["layers"][:1]})
        assert wrong.status_code == 400 and "layers" in wrong.text
        assert admin.post("/admin/placement", json=placement).status_code == 202
    assert server.stop()[0] == 0


@pytest.mark.alone
def test_a_stop_lets_streams_end_and_a_second_one_tells_them(up):
    server = up("--gateways", "2")
    reader = Stream(server.url).begun()
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    server.process.send_signal(signal.SIGINT)
    code, _ = server.wait()
    reader.join(30)
    assert code == 130
    assert "stopped" in reader.error, "its end was not waited for"


def test_what_ended_the_run_reaches_the_streams(up):
    server = up("--gateways", "1", "--on-loss", "end")
    pids = server.status()
    reader = Stream(server.url).begun()
    psutil.Process(pids["expert-0"]).kill()
    reader.join(30)
    code, printed = server.wait()
    assert code != 0 and "expert-0: its process was killed by SIGKILL" in printed
    assert "expert-0" in reader.error


def test_a_killed_gateway_process_is_named(up):
    server = up("--gateways", "2", "--on-loss", "end")
    psutil.Process(server.status()["gateway-1"]).kill()
    code, printed = server.wait()
    assert code != 0 and "gateway-1: its process was killed by SIGKILL" in printed


def test_a_gateway_joins_by_hand_and_goes_without_harm(up):
    server = up("--experts", "2")
    ((_, expected),) = texts(server, 1)
    port = free_port()
    processes = [root := psutil.Process(server.process.pid), *root.children()]
    joined = next(c.laddr for p in processes for c in p.net_connections() if is_for_nodes(c, server))
    command = ["node", "--role", "gateway", "--join", f"127.0.0.1:{joined.port}", "--port", str(port)]
    token = str(server.folder() / "token")
    with open(os.devnull, "wb") as quiet:
        guest = WARM.run([*command, "--token-file", token], quiet)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 60
        while not is_ready(url):
            assert time.monotonic() < until and guest.poll() is None
            time.sleep(0.05)
        assert "gateway-1" in server.status()
        answer = httpx.post(f"{url}/v1/completions", json=ASK, timeout=60)
        assert answer.json()["choices"][0]["text"] == expected
        guest.kill()
        guest.wait(10)
        assert texts(server, 4) == [(200, expected)] * 4
        until = time.monotonic() + 30
        while "gateway-1" in server.status():
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        guest.kill()
        guest.wait(10)
    assert server.stop()[0] == 0


def is_for_nodes(connection, server):
    return connection.status == psutil.CONN_LISTEN and connection.laddr.port != server.port


def is_ready(url):
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_options_of_a_gateway_are_refused_elsewhere(tmp_path):
    token = tmp_path / "token"
    token.write_text("x")
    command = ["node", "--role", "expert", "--join", "h:1", "--token-file", str(token), "--port", "1"]
    done = WARM.said(*command)
    assert done.returncode == 2 and "--port: is for --role gateway" in done.stderr
