"""Nodes are killed and stopped under streams of real processes: clients are told the same tokens, and nothing hangs."""

import contextlib
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.streams import PROMPTS, begun, ended, same_after, texts, wait

pytestmark = pytest.mark.process  # those that stop processes, or all of them at once, are alone, too
COPIES = ("--attention", "2", "--experts", "3", "--expert-copies", "2")
FEW = ("--attention", "1", "--experts", "2")
ADMIN = {"Authorization": "Bearer secret"}
NANO = Path(__file__).parents[2] / "configs" / "nano"


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("secret\n")
    path.chmod(0o600)
    return str(path)


def status(server):
    return httpx.get(f"{server.url}/status", headers=ADMIN, timeout=60).json()


def serving(server):
    """Name -> pid of the nodes that serve."""
    return {node["name"]: node["pid"] for node in status(server)["nodes"] if node["state"] == "ready"}


def kill(*pids, number=signal.SIGKILL):
    for pid in pids:
        os.kill(pid, number)


def incidents(server, what, since=0.0):
    """Names of nodes to which this happened from then on, as `time.time` says."""
    found = status(server)["incidents"]
    return [each["node"] for each in found if each["what"] == what and each["at"] >= since]


def lost(server):
    return sum(sum(causes.values()) for causes in status(server)["lost"].values())


def whole(server):
    """All nodes that are wanted serve."""
    wanted = sum(status(server)["wanted"].values())

    def all_of_them():
        found = serving(server)
        return len(found) == wanted and found

    return wait(all_of_them, "a node")


@pytest.mark.by_day(every=2)
@pytest.mark.parametrize(
    "names",
    [("expert-1",), ("attention-0",), ("attention-1", "expert-2")],
    ids=["an expert node with copies", "an attention node", "both at once"],
)
def test_streams_go_on_with_the_same_tokens(shared_up, names, undisturbed):
    streams_go_on(shared_up(*COPIES), names, undisturbed)


def streams_go_on(server, names, undisturbed):
    expected = undisturbed(server.url)
    before, lost_before, since = whole(server), lost(server), time.time()
    streams = begun(server.url)
    kill(*(before[name] for name in names))
    assert texts(streams) == expected
    wait(lambda: lost(server) - lost_before >= len(names), "the loss")
    wait(lambda: set(names) <= set(incidents(server, "returned", since)), "its return")
    after = whole(server)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} >= set(names)
    assert same_after(server.url, expected)


def test_one_is_killed_while_another_one_is_recovered(shared_up, undisturbed):
    server = shared_up(*COPIES)
    expected = undisturbed(server.url)
    before, lost_before = whole(server), lost(server)
    streams = begun(server.url)
    kill(before["expert-0"])
    wait(lambda: lost(server) > lost_before, "the loss")
    kill(before["expert-1"])
    assert texts(streams) == expected
    again = whole(server)["expert-0"]
    streams = begun(server.url)
    kill(again)
    successor = wait(lambda: _other(server, "expert-0", again), "a successor")
    kill(successor)
    assert texts(streams) == expected
    whole(server)
    assert same_after(server.url, expected)


def _other(server, name, pid):
    """The pid of this node's next process."""
    nodes = {node["name"]: node["pid"] for node in status(server)["nodes"]}
    return nodes.get(name) if nodes.get(name) != pid else None


@pytest.mark.alone
@pytest.mark.long
def test_one_is_killed_while_the_deployment_grows_and_shrinks(up, keys, undisturbed):
    server = up(*COPIES, "--admin-key-file", keys)
    expected = undisturbed(server.url)
    for change, name in (({"experts": "+1"}, "expert-0"), ({"experts": "-1", "attention": "+1"}, "expert-1")):
        streams, pid = begun(server.url), serving(server)[name]
        answer = httpx.post(f"{server.url}/admin/scale", json=change, headers=ADMIN, timeout=60)
        assert answer.status_code == 202, answer.text
        kill(pid)
        assert texts(streams) == expected
        wait(lambda: name in incidents(server, "returned"), f"{name} again")  # noqa: B023
        whole(server)
    wait(
        lambda: (
            set(serving(server))
            == {*(f"attention-{i}" for i in range(3)), *(f"expert-{i}" for i in range(3))}
        )
    )
    assert same_after(server.url, expected)
    assert server.stop()[0] == 0


@pytest.mark.alone
@pytest.mark.parametrize("name", [pytest.param("expert-1", marks=pytest.mark.long), "attention-1"])
def test_one_that_is_stopped_for_a_while(shared_up, name, undisturbed):
    """Longer than `--silence`: it is fenced, its work is done elsewhere, and its place is filled."""
    server = shared_up(*COPIES)
    expected = undisturbed(server.url)
    pid, streams = whole(server)[name], begun(server.url)
    kill(pid, number=signal.SIGSTOP)
    waking = threading.Timer(2.5, _wake, [pid])
    waking.start()
    assert texts(streams) == expected
    waking.join()
    whole(server)
    assert same_after(server.url, expected)


@pytest.mark.alone
def test_all_nodes_at_once(shared_up, undisturbed):
    """Prompt, parameters and tokens so far are with the gateway: everything goes on once there are nodes again."""
    server = shared_up(*COPIES)
    expected = undisturbed(server.url)
    before, lost_before = whole(server), lost(server)
    streams = begun(server.url)
    kill(*before.values())
    for stream in ended(streams):
        if stream.error:  # on a very slow machine, after the deadline
            assert "attention-" in stream.error or "expert" in stream.error
            assert expected[stream.prompt].startswith(stream.text)
        else:
            assert stream.text == expected[stream.prompt]
    whole(server)
    assert same_after(server.url, expected) and len(expected) == len(PROMPTS)
    assert lost(server) > lost_before


@pytest.mark.long
def test_over_pairs_two_are_killed(up, undisturbed):
    server = up(*COPIES, "--transport", "pairs")
    streams_go_on(server, ("expert-1", "attention-0"), undisturbed)
    assert server.stop()[0] == 0


def test_an_expert_node_without_copies_is_killed(shared_up, undisturbed):
    streams_go_on(shared_up(*FEW), ("expert-1",), undisturbed)


@pytest.mark.alone
def test_the_only_attention_node_that_stands_still_keeps_what_it_has(shared_up, undisturbed):
    """Nobody else could take its requests over: it is waited for longer, and goes on where it was."""
    server = shared_up(*FEW)
    expected = undisturbed(server.url)
    before, lost_before = whole(server), lost(server)
    streams = begun(server.url)
    kill(before["attention-0"], number=signal.SIGSTOP)
    waking = threading.Timer(3.0, _wake, [before["attention-0"]])
    waking.start()
    assert texts(streams) == expected
    waking.join()
    assert serving(server) == before and lost(server) == lost_before


def test_what_happened_is_told_everywhere(up, undisturbed):
    server = up("--attention", "1", "--experts", "2", "--gateways", "1")
    expected = undisturbed(server.url)
    streams = begun(server.url)
    kill(serving(server)["expert-0"])
    assert texts(streams) == expected
    wait(lambda: "expert-0" in incidents(server, "returned"), "its return")
    told = {each["what"]: each for each in status(server)["incidents"]}
    assert told["lost"]["cause"] == "ended" and "experts" in told["lost"]["did"]
    assert abs(told["lost"]["at"] - time.time()) < 600 and told["returned"]["seconds"] > 0
    assert status(server)["lost"]["expert"]["ended"] == 1
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert 'afserve_nodes_lost_total{model_name="nano",role="expert",cause="ended"} 1' in metrics
    assert 'afserve_nodes_wanted{model_name="nano",role="expert"} 2' in metrics
    assert server.stop()[0] == 0


def test_a_checkpoint_that_was_away_for_a_while_is_served_again_without_a_command(up, keys, tmp_path):
    """While nothing serves, changes are taken: they are what repairs."""
    here, away = tmp_path / "checkpoint", tmp_path / "away"
    shutil.copytree(NANO, here)
    server = up("--model", str(here), "--attention", "1", "--experts", "2", "--admin-key-file", keys)
    before = serving(server)
    here.rename(away)
    kill(before["attention-0"], before["expert-1"])
    wait(lambda: "attention-0" in incidents(server, "keeps failing"), "its sixth loss")
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60)
    assert refused.status_code == 503 and str(tmp_path) not in refused.text, refused.text
    for verb, body in (("scale", {"experts": "+1"}), ("drain", {"node": "expert-2"})):
        answer = httpx.post(f"{server.url}/admin/{verb}", json=body, headers=ADMIN, timeout=60)
        assert answer.status_code == 202, answer.text
    away.rename(here)
    after = wait(lambda: set(serving(server)) == set(before) and serving(server), "a node")
    assert after["attention-0"] != before["attention-0"] and after["expert-0"] == before["expert-0"]
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert server.stop()[0] == 0


def _wake(pid):
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return  # it has been killed meanwhile, as its place has another process


@pytest.mark.alone
def test_faults_on_purpose(up, keys, undisturbed):
    """What `afserve chaos` asks for: of this run's processes only, and with the admin key."""
    server = up("--attention", "2", "--experts", "2", "--expert-copies", "2", "--admin-key-file", keys)
    expected = undisturbed(server.url)

    def fault(**body):
        return httpx.post(f"{server.url}/admin/fault", json=body, headers=ADMIN, timeout=60)

    assert httpx.post(f"{server.url}/admin/fault", json={}, timeout=60).status_code == 401
    for body, code, said in (
        ({"node": "expert-9", "fault": "kill"}, 404, "none of this run's"),
        ({"node": "expert-0", "fault": "burn"}, 400, "kill, stop, slow"),
        ({"node": "expert-0", "fault": "stop"}, 400, "how long"),
    ):
        answer = fault(**body)
        assert answer.status_code == code and said in answer.text
    streams = begun(server.url)
    assert fault(node="expert-0", fault="slow", seconds=0.5).json()["notes"][0].startswith("slow expert-0")
    assert fault(node="expert-1", fault="stop", seconds=0.3).status_code == 202
    pid = serving(server)["attention-0"]
    assert str(pid) in fault(node="attention-0", fault="kill").text
    assert texts(streams) == expected
    wait(lambda: "attention-0" in incidents(server, "returned"), "its return")
    whole(server)
    assert same_after(server.url, expected)
    server.controller().kill()

    def is_obeyed():
        with contextlib.suppress(httpx.TransportError):
            return fault(node="expert-1", fault="slow", seconds=0.1).status_code == 202

    wait(is_obeyed, "a controller that can break what an earlier one has started")
    assert fault(node="expert-0", fault="stop", seconds=600).status_code == 202
    assert server.stop()[0] == 0, "who is stopped on purpose goes on when the run ends"
