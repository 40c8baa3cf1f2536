"""`afserve chaos` against a scripted server: what is drawn, what is asked, what is printed."""

import random

import pytest
from click.testing import CliRunner

from afserve.cli.chaos import ChaosRun, FaultPlan, Lasting, chaos, serving
from afserve.errors import CapacityError, ConfigError

NODES = ("attention-0", "attention-1", "expert-0", "expert-1")


class Server:
    """A client of a server that loses whoever is killed, and has it back at the next look."""

    def __init__(self, refuses=()):
        self.asked, self.incidents, self.lost, self.refuses = [], [], 0, refuses

    def status(self):
        nodes = [{"name": name, "role": name.partition("-")[0], "state": "ready"} for name in NODES]
        return {
            "nodes": nodes,
            "wanted": {"attention": 2, "expert": 2, "gateway": 0},
            "incidents": list(self.incidents),
            "lost": {"expert": {"ended": self.lost}},
            "moved": {"lost": 3 * self.lost},
            "resent_rows": self.lost,
            "reloaded_bytes": 1_000_000 * self.lost,
        }

    def fault(self, node, fault, seconds=0.0):
        if node in self.refuses:
            raise CapacityError("not now")
        self.asked.append((node, fault, seconds))
        if fault == "kill":
            self.lost += 1
            self.incidents.append(
                {"at": float(self.lost), "node": node, "stall": 0.0, "text": f"{node} lost"}
            )
        return {"notes": [f"{fault} {node}"]}


def played(server, seed=1, kinds=("kill", "stop", "slow"), roles=("expert", "attention"), faults=6):
    one = ChaosRun(server, FaultPlan(0.0, 2.0, roles, kinds), random.Random(seed))
    for _ in range(faults):
        one._break_one()
        one._tell(server.status())
    return server.asked


def test_the_same_seed_draws_the_same_faults(capsys):
    first = played(Server())
    assert first == played(Server()) != played(Server(), seed=2)
    assert all((kind == "kill") == (seconds == 0.0) for _, kind, seconds in first)
    assert "lost" in capsys.readouterr().out


def test_only_roles_and_kinds_that_were_asked_for():
    asked = played(Server(), kinds=("kill",), roles=("expert",), faults=20)
    assert {node for node, _, _ in asked} == {"expert-0", "expert-1"}
    assert list(serving(Server().status(), ("gateway",))) == []


def test_who_cannot_be_broken_is_left_alone(capsys):
    server = Server(refuses=NODES)
    assert played(server) == []
    assert "was left alone: not now" in capsys.readouterr().out


def test_a_wait_that_is_known_later_is_told_later(capsys):
    server = Server()
    played(server, kinds=("kill",), faults=1)
    one = ChaosRun(server, FaultPlan(0.0, 2.0, ("expert",), ("kill",)), random.Random(0))
    one._tell(server.status())
    server.incidents[0]["stall"] = 0.123
    one._tell(server.status())
    assert "work waited 123 ms" in capsys.readouterr().out


def test_the_run_ends_with_a_sum(capsys):
    server = Server()
    ChaosRun(server, FaultPlan(0.0, 2.0, ("expert",), ("kill",)), random.Random(0)).run(0.01)
    said = capsys.readouterr().out
    assert (
        f"{server.lost:,} nodes lost, {3 * server.lost:,} requests moved" in said
        and "all nodes serve" in said
    )


@pytest.mark.parametrize(("text", "seconds"), [("5", 5), ("5s", 5), ("500ms", 0.5), ("0.5s", 0.5)])
def test_times(text, seconds):
    assert Lasting(0.1, 10).convert(text, None, None) == seconds


def test_mistakes_are_named():
    for words, said in (
        (["--roles", "expert,chef"], "--roles: 'chef'"),
        (["--kinds", "burn"], "--kinds: 'burn'"),
        (["--every", "soon"], "--every"),
    ):
        result = CliRunner().invoke(chaos, words)
        assert isinstance(result.exception, ConfigError) and said in result.exception.message
