"""A checkpoint that is cut while it is served: who has its weights lives on, and what is lost comes back with it."""

import os
import shutil
import signal

import httpx
import pytest

from afserve.launch.plan.models import CONFIGS
from tests.e2e.streams import wait

pytestmark = pytest.mark.process
ASK = {"prompt": "def main():\n", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("copies", [1, 2])
def test_a_cut_file_costs_no_node_and_all_is_well_when_it_is_back(up, tmp_path, copies):
    folder = tmp_path / "nano"
    shutil.copytree(CONFIGS / "nano", folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    flags = ("--attention", "2", "--experts", "3", "--expert-copies", str(copies))
    server = up("--model", str(folder), *flags)

    def answer():
        reply = httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=60)
        return reply.json()["choices"][0]["text"] if reply.status_code == 200 else ""

    def status():
        return httpx.get(f"{server.url}/status", timeout=60).json()

    def lives():
        return {node["name"]: node["pid"] for node in status()["nodes"] if node["name"] != "expert-2"}

    def unread():
        return [one for one in status()["incidents"] if one["what"] == "cannot read experts"]

    expected, before = answer(), lives()
    assert expected and len(before) == 4
    os.truncate(weights, len(whole) // 3)
    assert answer() == expected
    os.kill(next(n["pid"] for n in status()["nodes"] if n["name"] == "expert-2"), signal.SIGKILL)
    if copies == 2:
        assert answer() == expected
    else:
        (first, *_) = wait(unread, "what an expert node says of the file")
        assert "model.safetensors" in first["why"] and "keeps what it has" in first["did"]
    assert lives() == before
    weights.write_bytes(whole)
    wait(lambda: answer() == expected, "an answer as before")
    assert lives() == before
