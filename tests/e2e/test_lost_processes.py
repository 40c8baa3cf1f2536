"""Every process that `afserve up` starts is lost, alone and with others; so are its folder and its output.

Nodes, gateways and the controller alone are in `test_losses`, `test_lost_gateway` and `test_supervisor`, text processes
in `tests/server/test_text_pool.py`.
"""

import os
import shutil
import signal

import pytest

from tests.e2e.test_supervisor import Reader, seen, wait

pytestmark = pytest.mark.process
FLAGS = ("--attention", "1", "--experts", "2", "--gateways", "1")
SECRETS = {
    "HF_TOKEN": "hf_never",
    "AWS_SECRET_ACCESS_KEY": "aws_never",
    "DATABASE_URL": "postgres://u:pw_never@host/",
    "AFSERVE_LOG_LEVEL": "info",
}


def lose(server, *names, number=signal.SIGKILL):
    """All of these at once; returns when each has another process and all is served."""
    nodes = server.status()
    lost = {name: pid for name, pid in processes(server).items() if name in names}
    for pid in lost.values():
        os.kill(pid, number)
    wait(lambda: is_whole(processes(server), nodes, lost))
    assert {name for name, pid in server.status().items() if nodes[name] != pid} == set(lost) & set(nodes)


def is_whole(now, nodes, lost):
    return {*nodes, "fork server", "controller"} <= set(now) and not lost.items() & now.items()


def processes(server):
    """Pids by name, of those that there are now."""
    forks, controller = server.fork_servers(), server.controller()
    found = {"fork server": forks[0].pid} if forks else {}
    return {**found, **({"controller": controller.pid} if controller else {}), **(seen(server) or {})}


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.long)], ids=["warm", "cold"])
def test_no_stream_breaks_when_the_fork_server_is_lost_alone_and_with_others(up, cold):
    """Warm, another fork server is there at once; cold, seconds later."""
    server = up(*FLAGS, cold=cold)
    expected = Reader(server).begun().ended()
    cases = [
        ("fork server",),
        ("fork server", "expert-1"),
        ("fork server", "controller"),
        ("fork server", "controller", "expert-0"),
    ]
    for number, names in zip((signal.SIGTERM, *[signal.SIGKILL] * 3), cases, strict=True):
        reader = Reader(server).begun()
        lose(server, *names, number=number)
        assert reader.ended() == expected, names
    reader = Reader(server).begun()
    lose(server, "controller", number=signal.SIGTERM)
    assert reader.ended() == expected
    code, printed = server.stop(signal.SIGTERM)
    assert code == 0 and printed.count("another one starts, nodes go on") == len(cases)


@pytest.mark.parametrize(
    "names", [("fork server",), ("controller",), ("fork server", "controller")], ids=" and ".join
)
def test_a_start_goes_on_when_they_are_lost(up, names):
    server = up(*FLAGS, ready=False)
    at_once = {
        "fork server": lambda: next(iter(server.fork_servers()), None),
        "controller": server.controller,
    }
    wait(lambda: all(at_once[name]() for name in names))
    for name in names:
        at_once[name]().kill()
    server.wait_ready()
    assert server.stop()[0] == 0


def test_nothing_needs_the_folder_once_the_run_has_begun(up):
    server = up(*FLAGS)
    expected = Reader(server).begun().ended()
    folder = server.folder()
    token = (folder / "token").read_text()
    shutil.rmtree(folder)
    for names in (("expert-0",), ("attention-0",), ("controller",), ("fork server", "expert-1", "gateway-0")):
        lose(server, *names)
    wait((folder / "token").is_file)
    assert (folder / "token").read_text() == token
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "token")] == [0o700, 0o600]
    assert Reader(server).begun().ended() == expected
    code, printed = server.stop()
    assert code == 0 and f"{folder} was removed" in printed


def test_a_run_needs_no_output_and_shows_nobody_the_shells_secrets(up, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    with open("/dev/full", "wb") as full:
        server = up("--attention", "1", "--experts", "1", "--gateways", "1", output=full, cold=True)
    for process in server.family():
        with open(f"/proc/{process.pid}/environ", "rb") as file:
            assert b"never" not in file.read(), process.name()
    assert server.stop(signal.SIGTERM)[0] == 0
