"""`afserve node --join` on a host whose copy of the checkpoint is another one: refused, and told what differs."""

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from afserve.clock import MonotonicClock
from afserve.config import FULL, ModelSource
from afserve.control.controller import Controller
from afserve.control.controller_wiring import Wiring
from afserve.control.identifying import reading
from afserve.control.wire import channel
from afserve.errors import RendezvousError
from afserve.families.table import load_spec
from afserve.launch.plan.machine import this_machine
from afserve.launch.plan.models import CONFIGS
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Wishes
from afserve.member import MODEL_ROLES
from afserve.models.shards import ShardFile
from tests.warm.interpreter import WARM

pytestmark = pytest.mark.process
SECONDS = 120.0
FOLDER = "model"  # relative: each process finds its own copy below its working folder
UP = "model.layers.2.mlp.experts.3.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
PROJECTION = "model.layers.0.self_attn.o_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    host = tmp_path_factory.mktemp("original")
    shutil.copytree(CONFIGS / "nano", host / FOLDER, ignore=shutil.ignore_patterns("*.png", "held*"))
    return host


def tensor(name, change):
    def apply(model: Path) -> None:
        found = load_file(model / "model.safetensors")
        found[name] = change(found[name]).contiguous()
        save_file(found, model / "model.safetensors")

    return apply


def text(name):
    def apply(model: Path) -> None:
        body = json.loads((model / name).read_text())
        body["_note"] = "another one"
        (model / name).write_text(json.dumps(body))

    return apply


def one_number(model: Path) -> None:
    """One bit between the samples of a large tensor."""
    with ShardFile(model / "model.safetensors") as file:
        place = next(t for t in file.tensors() if t.name == EMBEDDING)
    with open(model / "model.safetensors", "r+b") as file:
        file.seek(place.begin)
        first = file.read(1)
        file.seek(place.begin)
        file.write(bytes([first[0] ^ 1]))


def copy(original: Path, host: Path, change) -> Path:
    shutil.copytree(original, host)
    change(host / FOLDER)
    return host


def start(host: Path, role: str, address: str, token: Path, *more: str) -> subprocess.Popen[str]:
    command = [*WARM.command(), "node", "--role", role, "--join", address]
    command += ["--token-file", str(token), *more]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, cwd=host, stderr=subprocess.PIPE, text=True, env=environment)


def joined(original, hosts, tmp_path, monkeypatch, *more, own=True):
    """What the controller says, and what each node ended with and said; `hosts` are (role, host) of the nodes, where
    one is refused not of all that there would be."""
    monkeypatch.chdir(original)
    token = channel.new_token(Path(tempfile.mkdtemp(dir=tmp_path)))
    counts = [max(sum(role == each for role, _ in hosts), 1) for each in MODEL_ROLES]
    wishes = Wishes(*counts, kv_tokens=4096, threads=1)
    run = choose(load_spec(FOLDER), ModelSource(FOLDER, "nano"), this_machine(), wishes).deployment

    async def scenario():
        clock = MonotonicClock()

        def read(full, progress):
            return reading(run.source, MODEL_ROLES, full=full, progress=progress)

        wiring = Wiring(read_own=read if own else None)
        controller = Controller(run, channel.read_token(token), clock, wiring=wiring)
        address = await controller.start()
        nodes = [
            start(host, role, address, token, *(more if host != original else ())) for role, host in hosts
        ]
        try:
            await asyncio.wait_for(controller.wait_ready(), SECONDS)
            outcome = None
        except RendezvousError as error:
            outcome = error
        await controller.stop()
        if outcome is not None:
            for node, (_, host) in zip(nodes, hosts):
                if host == original:
                    node.terminate()  # one that had not been admitted looks for its controller, which is gone
        said = [await asyncio.to_thread(node.communicate, timeout=SECONDS) for node in nodes]
        return outcome, [(node.returncode, stderr) for node, (_, stderr) in zip(nodes, said)]

    return asyncio.run(scenario())


CHANGES = {
    "an expert": ("expert", tensor(UP, lambda t: t * 1.5), "expert weights"),
    "a dtype": ("expert", tensor(UP, lambda t: t.float()), "expert weights"),
    "a projection": ("attention", tensor(PROJECTION, lambda t: t.flip(0)), "attention weights"),
    "a norm": ("attention", tensor(NORM, lambda t: t + 0.5), "attention weights"),
    "the tokenizer": ("attention", text("tokenizer_config.json"), "tokenizer_config.json"),
}


BY_NIGHT = {"a dtype", "a projection", "a norm"}  # what a role reads is told apart in models/test_identity.py


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.long] * (what in BY_NIGHT)) for what in CHANGES]
)
def test_another_copy_is_refused(original, tmp_path, monkeypatch, what):
    role, change, thing = CHANGES[what]
    other = copy(original, tmp_path / "other", change)
    outcome, ended = joined(original, [(role, other)], tmp_path, monkeypatch)
    assert outcome is not None, "it served"
    assert outcome.message.startswith(f"{role}-0 disagrees with the controller on {thing}: ")
    assert "BF16" in outcome.message or thing.endswith(".json")
    if what == "a dtype":
        assert "BF16, F32) against" in outcome.message
    ((code, said),) = ended
    assert code != 0 and "Traceback" not in said
    assert said.startswith(f"error: {role}-0 disagrees with the controller on {thing}: "), said


def test_what_a_role_does_not_read_may_differ(original, tmp_path, monkeypatch):
    def change(model: Path) -> None:
        tensor(NORM, lambda t: t + 0.5)(model)
        (model / "tokenizer.json").unlink()

    other = copy(original, tmp_path / "other", change)
    outcome, ended = joined(original, [("attention", original), ("expert", other)], tmp_path, monkeypatch)
    assert outcome is None
    assert [code for code, _ in ended] == [0, 0]


def test_nodes_are_compared_with_each_other_too(original, tmp_path, monkeypatch):
    other = copy(original, tmp_path / "other", tensor(UP, torch.zeros_like))
    hosts = [("expert", original), ("expert", other)]
    outcome, _ = joined(original, hosts, tmp_path, monkeypatch, own=False)
    assert outcome is not None and "on expert weights: " in outcome.message
    assert outcome.message.startswith(
        ("expert-0 disagrees with expert-1", "expert-1 disagrees with expert-0")
    )


def test_one_number_is_seen_where_all_bytes_are_read(original, tmp_path, monkeypatch):
    other = copy(original, tmp_path / "other", one_number)
    outcome, _ = joined(original, [("attention", other)], tmp_path, monkeypatch, "--verify", FULL)
    assert outcome is not None
    assert outcome.message.startswith(
        "attention-0 disagrees with the controller on attention weights (all bytes): "
    )


def test_up_compares_all_bytes_where_it_is_asked_to(up):
    server = up("--verify", FULL, "--attention", "1", "--experts", "1")
    body = {"prompt": "def", "max_tokens": 2, "temperature": 0}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=SECONDS).status_code == 200
    assert server.stop()[0] == 0
