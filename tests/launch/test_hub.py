"""Checkpoints from a hub: what is fetched, what goes on where it broke off, and what is refused."""

import errno
import hashlib
import json
import os
from types import SimpleNamespace

import httpx
import pytest

from afserve.cli.main import run
from afserve.errors import (
    AuthError,
    CheckpointError,
    ConfigError,
    DoesNotFitError,
    NotFoundError,
    PeerLost,
    ProtocolError,
)
from afserve.launch.hub import download, listing
from afserve.launch.hub import pull as pulling
from afserve.launch.hub.cache import CachedModel
from afserve.launch.hub.download import Hub
from afserve.launch.hub.listing import HubFile, Listing
from afserve.launch.hub.pull import hub_of
from afserve.launch.plan.models import CONFIGS, find_model
from tests.launch.hub_server import COMMIT, Repository, serving
from tests.patching import patch_library

NANO = CONFIGS / "nano"
BOTH = ("attention", "expert")
INDEX = {
    "weight_map": {
        "model.embed_tokens.weight": "a.safetensors",
        "model.layers.0.mlp.experts.0.up_proj.weight": "b.safetensors",
        "model.layers.1.mlp.experts.0.up_proj.weight": "c.safetensors",
        "model.norm.weight": "c.safetensors",
    }
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "hub"


@pytest.fixture
def shards():
    files = {f"{name}.safetensors": name.encode() * 3000 for name in "abc"}
    files |= {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(INDEX).encode(),
        "README.md": b"#",
    }
    return Repository({**files, "pytorch_model.bin": b"\x80", "original/x.pth": b"\x80"})


def fetch(endpoint, roles=BOTH, revision="main", token=None):
    with Hub("owner/tiny", endpoint, token, pause=0.001) as hub:
        return pulling.pull(hub, revision, roles)


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_weights_and_texts_are_fetched_once_and_nothing_that_holds_programs(shards, cache):
    with serving(shards) as endpoint:
        folder = fetch(endpoint)
        assert names(folder) == shards.files.keys() - {"README.md", "pytorch_model.bin", "original/x.pth"}
        assert folder == cache / "models--owner--tiny" / "snapshots" / COMMIT
        assert (folder / "b.safetensors").read_bytes() == shards.files["b.safetensors"]
        before = len(shards.served)
        assert before == 5 and fetch(endpoint, revision=COMMIT) == folder and len(shards.served) == before
    assert CachedModel("owner/tiny").snapshot() == folder == CachedModel("owner/tiny").snapshot("main")
    assert (
        CachedModel("owner/tiny").snapshot(COMMIT) == folder
        and CachedModel("owner/tiny").snapshot("v1") is None
    )


@pytest.mark.parametrize(("role", "weights"), [("attention", "ac"), ("expert", "bc")])
def test_a_role_fetches_only_what_it_reads(shards, role, weights):
    with serving(shards) as endpoint:
        folder = fetch(endpoint, (role,))
    assert {name[0] for name in names(folder) if name.endswith(".safetensors")} == set(weights)


@pytest.mark.parametrize("ranges", [True, False])
def test_what_breaks_off_goes_on_where_it_was(shards, ranges):
    shards.breaks, shards.ranges, shards.busy = {"a.safetensors": [100, 0, 500]}, ranges, 2
    with serving(shards) as endpoint:
        folder = fetch(endpoint)
    assert (folder / "a.safetensors").read_bytes() == shards.files["a.safetensors"]
    asked = [where for name, where in shards.served if name == "a.safetensors"]
    if ranges:
        assert asked == ["", "bytes=100-", "bytes=100-", "bytes=600-"]
    else:  # the second answer began anew
        assert asked == ["", "bytes=100-", "", "bytes=500-"]


def test_a_later_process_goes_on_too(shards, cache):
    shards.breaks = {"a.safetensors": [100] + [0] * 9}
    with serving(shards) as endpoint:
        with pytest.raises(PeerLost, match="what has come is kept"):
            fetch(endpoint)
        digest = hashlib.sha256(shards.files["a.safetensors"]).hexdigest()
        part = cache / "models--owner--tiny" / "blobs" / f"{digest}.part"
        assert part.stat().st_size == 100
        shards.breaks, shards.served = {}, []
        folder = fetch(endpoint)
    assert ("a.safetensors", "bytes=100-") in shards.served and not list(part.parent.glob("*.part"))
    assert (folder / "a.safetensors").read_bytes() == shards.files["a.safetensors"]


@pytest.mark.parametrize("lie", [b"x" * 3000, b"a" * 3001])
def test_other_bytes_than_the_hub_lists_are_not_kept(shards, cache, lie):
    shards.lies = {"a.safetensors": lie}
    with (
        serving(shards) as endpoint,
        pytest.raises(CheckpointError, match=r"owner/tiny at cccccccccccc: a\.safetensors"),
    ):
        fetch(endpoint)
    assert not (cache / "models--owner--tiny" / "snapshots" / COMMIT / "a.safetensors").exists()


def test_what_is_not_there_or_not_allowed_is_said(shards):
    shards.token = "secret"
    with serving(shards) as endpoint:
        with pytest.raises(AuthError, match="HF_TOKEN"):
            fetch(endpoint)
        with pytest.raises(NotFoundError, match="revision v9"):
            fetch(endpoint, revision="v9", token="secret")
        with pytest.raises(ConfigError, match="not a commit, branch or tag"):
            fetch(endpoint, revision="../../x", token="secret")
        del shards.files["b.safetensors"]
        with pytest.raises(CheckpointError, match=r"no b\.safetensors .* pytorch_model\.bin is not fetched"):
            fetch(endpoint, token="secret")
        del shards.files["config.json"]
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            fetch(endpoint, token="secret")
    with pytest.raises(PeerLost):
        fetch("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="not a Hugging Face id"):
        hub_of("nano")
    for model in ("../x", "x/..", "./x", "-x/y", "/x", "a/b/c"):
        with pytest.raises(ConfigError, match="not a Hugging Face id"):
            hub_of(model)


def test_a_full_disk_and_a_second_process_are_said(shards, monkeypatch):
    with serving(shards) as endpoint:
        patch_library(monkeypatch, pulling, "shutil", disk_usage=lambda path: SimpleNamespace(free=9))
        with pytest.raises(DoesNotFitError, match="GiB are free"):
            fetch(endpoint)
        with CachedModel("owner/tiny").locked(), pytest.raises(ConfigError, match="another afserve"):
            fetch(endpoint)


def test_what_an_earlier_run_has_left_needs_no_room(shards, cache, monkeypatch):
    shards.breaks = {"a.safetensors": [2999] + [0] * 9}
    monkeypatch.setattr(pulling, "_SPARE", 0)
    with serving(shards) as endpoint:
        with pytest.raises(PeerLost):
            fetch(endpoint, ("attention",))
        shards.breaks = {}
        patch_library(monkeypatch, pulling, "shutil", disk_usage=lambda path: SimpleNamespace(free=3001))
        assert "a.safetensors" in names(fetch(endpoint, ("attention",)))


def test_a_disk_that_fills_up_is_said(shards, monkeypatch):
    def full(self, commit, file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CachedModel, "link", full)
    with (
        serving(shards) as endpoint,
        pytest.raises(ConfigError, match="No space left on device; make room there"),
    ):
        fetch(endpoint)


def test_answers_without_end_are_refused(shards, monkeypatch):
    with serving(shards) as endpoint:
        monkeypatch.setattr(listing, "_MOST_TEXT", 1)
        with pytest.raises(CheckpointError, match=r"config\.json: 2 bytes are listed, at most 1"):
            fetch(endpoint)
        monkeypatch.setattr(download, "_MOST_LISTING", 50)
        with pytest.raises(ProtocolError, match="a listing of more than 50 bytes"):
            fetch(endpoint)


def test_redirects_without_end_are_said(shards, cache):
    def again(request):
        return httpx.Response(302, headers={"location": str(request.url)})

    with Hub("owner/tiny", "http://hub", None, pause=0.001) as hub:
        hub._http = httpx.Client(transport=httpx.MockTransport(again), follow_redirects=True)
        file = HubFile("a.safetensors", 3, "0" * 64)
        with pytest.raises(ProtocolError, match=r"a\.safetensors"):
            hub.fetch(COMMIT, file, cache / "blob", lambda file, done: None)


def test_a_file_is_here_once_it_was_checked(shards):
    said = []
    shards.lies = {"a.safetensors": b"x" * 3000}
    with serving(shards) as endpoint, Hub("owner/tiny", endpoint, None, pause=0.001) as hub:
        with pytest.raises(CheckpointError):
            pulling.pull(hub, "main", BOTH, lambda file, done: said.append((file.name, done == file.size)))
        assert ("a.safetensors", True) not in said
        shards.lies = {}
        pulling.pull(hub, "main", BOTH, lambda file, done: said.append((file.name, done == file.size)))
    assert ("a.safetensors", True) in said


@pytest.mark.parametrize(
    "entry",
    [{"rfilename": "a b/../c", "size": "9"}, {"rfilename": "x\n", "size": 1, "blobId": "0" * 40}, 3,
     {"rfilename": "x", "size": -1, "blobId": "0" * 40}, {"rfilename": "x", "size": 1, "blobId": "../../../x"}],
)  # fmt: skip
def test_a_listing_that_no_hub_makes_is_refused(entry):
    body = {"sha": COMMIT, "siblings": [entry]}
    if entry == {"rfilename": "a b/../c", "size": "9"}:
        assert not Listing.read(body).files  # in a folder: of no interest
        return
    with pytest.raises(ProtocolError):
        Listing.read(body)
    with pytest.raises(ProtocolError):
        Listing.read({"sha": "../x", "siblings": []})


def test_the_cache_is_the_one_that_hugging_face_s_tools_have(shards, cache):
    hub = pytest.importorskip("huggingface_hub")
    with serving(shards) as endpoint:
        folder = fetch(endpoint)
    found = hub.snapshot_download("owner/tiny", cache_dir=cache, local_files_only=True)
    assert os.path.samefile(found, folder)


@pytest.mark.slow
def test_pull_and_then_a_run_finds_it(tmp_path, monkeypatch, capsys):
    nano = Repository({path.name: path.read_bytes() for path in NANO.iterdir() if path.is_file()})
    with pytest.raises(ConfigError, match="afserve pull owner/tiny"):
        find_model("owner/tiny", tmp_path)
    with serving(nano) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert run(["pull", "owner/tiny", "--revision", "v1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = find_model("owner/tiny", tmp_path, "v1")
    assert said["commit"] == COMMIT and said["folder"] == str(found.folder) and found.weights
    for flag, values in (("revision", ("v1", None)), ("download", (None, lambda model, revision: tmp_path))):
        with pytest.raises(ConfigError, match=f"--{flag}: nano is no Hugging Face id"):
            find_model("nano", tmp_path, *values)


def test_the_token_stays_with_the_hub(shards):
    """The files are behind a redirect to another host: that one is not told."""
    shards.token = "secret"
    with serving(shards) as other:
        shards.cdn = other.replace("127.0.0.1", "localhost")
        with serving(shards) as endpoint:
            fetch(endpoint, token="secret")
    assert shards.told == {"127.0.0.1": "Bearer secret", "localhost": None}
