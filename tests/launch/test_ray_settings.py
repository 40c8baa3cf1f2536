"""What a user asks of Ray, and what a run makes of the hosts that Ray gives it. Values only; Ray is not needed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from afserve.cli.up import asked_of, up
from afserve.errors import ConfigError
from afserve.launch.plan.hosts import listening
from afserve.launch.plan.models import CONFIGS, find_model
from afserve.launch.plan.ray_settings import RaySettings, bundle_of, in_words
from afserve.launch.plan.wishes import RunSettings, Wishes
from afserve.launch.sites.choose import choose_site
from afserve.launch.sites.ray import RaySite
from afserve.launch.sites.ray_plan import set_aside
from afserve.member import Role, attention_node, expert_node

MACHINE = {"cores": 4, "memory": 8 << 30, "memory_total": 16 << 30, "limited_by": ""}


class FakeRay(RaySite):
    """Answers as the helper would, with a host for each node but the last, which shares the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, Any] = {}

    def ask(self, what: Any) -> Any:
        if what["ask"] == "connect":
            return {"own": "10.0.0.1", "hosts": ["10.0.0.1", "10.0.0.2", "10.0.0.3"]}
        self.asked = what
        names = [f"{role}-{n}" for role, pool in what["pools"].items() for n in range(pool["nodes"])]
        hosts = [f"10.0.0.{n + 1}" for n in range(len(names) - 1)] + ["10.0.0.1"]
        return [
            {"node": name, "host": host, "address": host, "name": host, "machine": MACHINE, "gpus": None}
            for name, host in zip(names, hosts, strict=True)
        ]


def ray_settings(*flags: str) -> RaySettings:
    return asked_of(dict(up.make_context("up", list(flags)).params)).ray


def test_resources_are_read() -> None:
    found = bundle_of("--ray-attention", "CPU=4, GPU=1,accelerator=H20,fast_disk=0.5")
    assert found == {"CPU": 4.0, "GPU": 1.0, "accelerator_type:H20": 0.001, "fast_disk": 0.5}
    assert in_words({"CPU": 4.0, "gold": 0.5}) == "CPU=4,gold=0.5"


@pytest.mark.parametrize(
    "text", ["", "CPU", "CPU=", "CPU=-1", "CPU=nan", "CPU=1e99", "=1", "CPU=1,CPU=2", "CPU=1,2"]
)
def test_other_resources_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--ray-experts"):
        RaySettings(ray="auto", ray_experts=text)


def test_the_address_may_be_left_out() -> None:
    assert ray_settings().ray is None
    assert ray_settings("--ray").ray == "auto"
    assert ray_settings("--ray", "--experts", "2").ray == "auto"
    assert ray_settings("--ray", "10.0.0.1:6379").ray == "10.0.0.1:6379"
    assert dict(RaySettings().bundle(Role.EXPERT, cuda=True)) == {"CPU": 1.0, "GPU": 1.0}


def test_a_run_is_planned_for_the_hosts_that_ray_gives(tmp_path: Path) -> None:
    asked = RaySettings(ray="auto", ray_experts="CPU=2", ray_placement="strict-spread", ray_wait=7)
    launcher = FakeRay()
    plan = set_aside(launcher.ask, asked, Wishes(attention=1, experts=2), find_model("nano", tmp_path), None)
    assert launcher.asked["pools"]["expert"] == {"bundle": {"CPU": 2.0}, "nodes": 2}
    assert (launcher.asked["strategy"], launcher.asked["seconds"]) == ("STRICT_SPREAD", 7)
    assert launcher.asked["model"] == str(CONFIGS / "nano")
    assert plan.wishes.threads == 1, "the least CPUs that any node is given"
    assert plan.wishes.expert_hosts == (0, 1)
    assert [(s.attention, s.experts) for s in plan.wishes.hosts] == [(1, 1), (0, 1)]
    assert (plan.assignment.listen, plan.machine.cores) == ("10.0.0.1", 4)
    assert plan.assignment.managed and plan.assignment.starts(expert_node(9))
    assert [one.node for one in plan.assignment.having(attention_node(3)).hosted][-1] == attention_node(3)


def test_without_counts_there_is_an_expert_node_per_host(tmp_path: Path) -> None:
    plan = set_aside(
        FakeRay().ask, RaySettings(ray="auto"), Wishes(), find_model("nano", tmp_path), "10.0.0.9:77"
    )
    assert (plan.wishes.attention, plan.wishes.experts) == (1, 3)
    assert (plan.assignment.listen, plan.assignment.port) == ("10.0.0.9", 77)


def test_nodes_join_on_loopback_where_ray_is_this_machine() -> None:
    assert listening(None, "10.0.0.1", {"10.0.0.1"}) == ("127.0.0.1", 0)
    assert listening(None, "10.0.0.1", {"10.0.0.1", "10.0.0.2"}) == ("10.0.0.1", 0)
    assert listening("[fd00::1]:7700", "10.0.0.1", set()) == ("fd00::1", 7700)


def test_a_device_of_one_number_is_ray_s_to_choose(tmp_path: Path) -> None:
    from afserve.config import EngineSettings

    wishes = Wishes(engine=EngineSettings(device="cuda:1"))
    with pytest.raises(ConfigError, match="Ray gives each node its own GPU"):
        set_aside(FakeRay().ask, RaySettings(ray="auto"), wishes, find_model("nano", tmp_path), None)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ((), "LocalSite"),
        (("--cluster", "FILE"), "HostsSite"),
        (("--cluster", "FILE", "--ssh"), "HostsSite"),
        (("--elsewhere", "--listen", "10.0.0.1:7700"), "AwaitedSite"),
        (("--ray",), "RaySite"),
    ],
)
def test_flags_say_which_kind_of_site_it_is(flags: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.touch()
    words = [str(file) if word == "FILE" else word for word in flags]
    asked = asked_of(dict(up.make_context("up", words).params))
    assert type(choose_site(asked.run, asked.ray)).__name__ == kind


def test_a_token_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--token-file .*nowhere/token: No such file"):
        choose_site(RunSettings(token_file=tmp_path / "nowhere" / "token"), RaySettings())


@pytest.mark.slow
def test_a_local_run_never_imports_ray() -> None:
    """Nor does anything but the helper process of a run on Ray."""
    modules = "afserve.doors.llm, afserve.launch.run.up, afserve.launch.sites.ray"
    code = f"import sys, {modules}; print('ray' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
