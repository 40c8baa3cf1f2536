"""Each setting is declared once and reachable by flag, environment, file and, for the engine's, keyword and wire.

The last test adds a setting to the source of `afserve/config.py` and follows it to a node, with nothing else changed.
"""

import inspect
import json
import subprocess
import sys
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import click
import pytest

from afserve import config
from afserve.cli.main import run
from afserve.cli.up import asked_of, up
from afserve.config import EngineSettings, ModelSource
from afserve.config_ranges import Range
from afserve.control.pilot.settings import PilotSettings
from afserve.doors.llm import LLM
from afserve.errors import ConfigError
from afserve.launch.plan.ray_settings import RaySettings
from afserve.launch.plan.wishes import RunSettings, UpFlags, Wishes
from afserve.launch.processes import http, keeper
from afserve.launch.processes.gateway_options import GatewayOptions, options_of
from afserve.server.http.settings import Listening, ServerSettings
from afserve.settings import DeclaredSetting, FileUse, settings_of

GROUPS = (
    RunSettings, ModelSource, Wishes, EngineSettings, Listening, ServerSettings, RaySettings, PilotSettings,
)  # fmt: skip
SETTINGS = [pytest.param(group, one, id=one.name) for group in GROUPS for one in settings_of(group)]

# Texts that are read at once.
WRITTEN = {
    "kv_events": "tcp://127.0.0.1:5557",
    "kv_host": "7GiB",
    "expert_memory": "7GiB",
    "gpu_kernels": "flashinfer,fla",
    "draft": "ngram:7",
    "speculative_config": '{"method": "ngram"}',
}


def asked(*arguments: str) -> UpFlags:
    return asked_of(dict(up.make_context("up", list(arguments)).params))


def held(flags: UpFlags, group: type) -> Any:
    every = (
        flags.run,
        flags.source,
        flags.wishes,
        flags.wishes.engine,
        flags.listening,
        flags.limits,
        flags.ray,
        flags.pilot,
    )
    return every[GROUPS.index(group)]


def other(one: DeclaredSetting, folder: Path) -> tuple[object, str]:
    """A value that is not the default, and how a user writes it."""
    if one.kind is bool:
        return not one.default, str(not one.default).lower()
    if one.allowed is FileUse.FOLDER:
        return folder, str(folder)
    if isinstance(one.allowed, FileUse):
        (folder / "file").touch()
        return folder / "file", str(folder / "file")
    if isinstance(one.allowed, tuple):
        return one.allowed[-1], one.allowed[-1]
    if one.kind is tuple:
        return ("a", "b"), "a, b"
    if one.kind is Path:
        return folder / "any", str(folder / "any")
    if one.name in WRITTEN:
        return WRITTEN[one.name], WRITTEN[one.name]
    if one.kind is str:
        return "7", "7"
    value = one.allowed.high if isinstance(one.allowed, Range) else 7
    return one.kind(value), str(value)


def needed(one: DeclaredSetting) -> list[str]:
    beside = {"layers": ["--load-format", "dummy"], "gpu_kernels": ["--device", "cuda"]}
    return beside.get(one.name, [])


@pytest.mark.parametrize(("group", "one"), SETTINGS)
def test_a_setting_is_reached_by_flag_environment_and_file(group, one, tmp_path, monkeypatch):
    value, written = other(one, tmp_path)
    assert getattr(held(asked(), group), one.name) == one.default != value
    by_flag = [one.flag, written]
    if one.kind is bool:
        by_flag = [one.flag if value else one.flag.replace("--", "--no-", 1)]
    assert getattr(held(asked(*needed(one), *by_flag), group), one.name) == value

    quoted = written if one.kind in (bool, int, float) else json.dumps(written)
    (tmp_path / "up.toml").write_text(f"{one.flag[2:]} = {quoted}\n")
    by_file = [*needed(one), "--config", str(tmp_path / "up.toml")]
    assert getattr(held(asked(*by_file), group), one.name) == value

    monkeypatch.setenv(f"AFSERVE_{one.name.upper()}", written)
    assert getattr(held(asked(*needed(one)), group), one.name) == value


@pytest.mark.parametrize("flag", ["--served-model-name", "--allowed-host", "--allowed-origin"])
@pytest.mark.parametrize("written", [",,", "", " ", "a,", "a,,b", "a,b,a"])
def test_empty_and_double_parts_of_a_list_are_refused(flag, written, capsys):
    assert run(["up", "--port", "0", flag, written]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: Invalid value for '{flag}': ") and said.count("\n") == 1
    assert "'a' twice; write it once" in said if written == "a,b,a" else "has an empty part" in said


def test_an_empty_list_of_the_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("AFSERVE_SERVED_MODEL_NAME", "")
    assert asked().listening.served_model_name == ()


def test_every_flag_is_a_setting():
    names = [one.name for group in GROUPS for one in settings_of(group)]
    assert sorted(names) == sorted(
        {str(one.name) for one in up.params if isinstance(one, click.Option)} - {"config", "write_config"}
    )
    assert all(one.help or one.name == "log_level" for group in GROUPS for one in settings_of(group))


def test_a_flag_comes_before_the_environment_and_that_before_the_file(tmp_path, monkeypatch):
    (tmp_path / "up.toml").write_text("threads = 1\nkv-tokens = 10\nblock_size = 100\n")
    monkeypatch.setenv("AFSERVE_CONFIG", str(tmp_path / "up.toml"))
    monkeypatch.setenv("AFSERVE_THREADS", "2")
    monkeypatch.setenv("AFSERVE_KV_TOKENS", "20")
    found = asked("--threads", "3").wishes
    assert (found.threads, found.kv_tokens, found.engine.block_size) == (3, 20, 100)


def test_what_the_environment_says_has_the_same_range(monkeypatch):
    monkeypatch.setenv("AFSERVE_MAX_BODY_BYTES", "nan")
    with pytest.raises(ConfigError, match="--max-body-bytes: 'nan' is not a whole number in"):
        asked()


def test_llm_takes_every_setting_but_those_of_http_by_name():
    shown = inspect.signature(LLM).parameters
    for one in settings_of(EngineSettings):
        assert shown[one.name].default == one.default
        assert shown[one.name].annotation in (one.kind, one.kind | None)
        assert shown[one.name].kind is inspect.Parameter.KEYWORD_ONLY
    sources = {one.name for one in settings_of(ModelSource)}
    wishes = {one.name: one for one in settings_of(Wishes) if one.name != "gateways"}
    assert sources | wishes.keys() | {"rebalance"} <= set(shown) and "gateways" not in shown
    assert all(shown[name].default == one.default for name, one in wishes.items())
    for values, said in (
        (
            {"block_sice": 16},
            "block_sice is not one of block_size, decode, decode_prompt_tokens, dense_dtype, device",
        ),
        ({"gateways": 1}, "gateways is not one of"),
        ({"on_loss": "weep"}, "on_loss: 'weep' is not one of recover, end"),
        ({"silence": 0.0}, "silence: 0.0 is outside"),
        ({"spare_slots": "two"}, "spare_slots: 'two' is not a whole number"),
    ):
        with pytest.raises(ConfigError, match=said):
            LLM(**values)


FOLLOW = """
import importlib.util, json, os, sys, types
spec = importlib.util.find_spec("afserve.config")
text = open(spec.origin, encoding="utf-8").read()
assert text.count(sys.argv[1]) == 1
module = types.ModuleType("afserve.config")
sys.modules["afserve.config"] = module
exec(compile(text.replace(sys.argv[1], sys.argv[1] + sys.argv[2]), spec.origin, "exec"), module.__dict__)

from afserve.cli.main import run
from afserve.cli.up import asked_of, up
from afserve.control.wire import messages
from afserve.control.wire.values import Assigned
from afserve.families.table import load_spec
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import CONFIGS
from afserve.launch.plan.topology import choose
from afserve.doors.llm import LLM
from afserve.member import attention_life, attention_node
from afserve.config import ModelSource

def asked(*arguments):
    return asked_of(dict(up.make_context("up", list(arguments)).params)).wishes

def at_the_node(wishes):
    folder = CONFIGS / "nano"
    machine = Machine(2, 8 << 30, 8 << 30, "")
    run = choose(load_spec(folder), ModelSource(str(folder), "nano"), machine, wishes).deployment
    data = messages.encode_to_node(Assigned(attention_life(0, 1), run))
    return messages.decode_to_node(data).deployment.engine.longest_hold

wishes = {"default": asked(), "flag": asked("--longest-hold", "0.5"), "file": asked("--config", sys.argv[3])}
os.environ["AFSERVE_LONGEST_HOLD"] = "0.125"
wishes["environment"] = asked()
wishes["keyword"] = LLM(longest_hold=0.0625)._asked.wishes
print(json.dumps({door: at_the_node(each) for door, each in wishes.items()}))
"""


@pytest.mark.slow
def test_a_new_setting_is_one_declaration(tmp_path):
    (tmp_path / "up.toml").write_text("longest-hold = 0.25\n")
    after = '    TOPIC: ClassVar[str] = "nodes"\n'
    line = '    longest_hold: float = setting(0.01, "Longest wait.", Range(0, 1, whole=False), metavar="SECONDS")\n'
    arguments = [after, line, str(tmp_path / "up.toml")]
    done = subprocess.run(
        [sys.executable, "-c", FOLLOW, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    at_the_node = {"default": 0.01, "flag": 0.5, "file": 0.25, "environment": 0.125, "keyword": 0.0625}
    assert json.loads(done.stdout) == at_the_node


def test_no_default_is_missing_where_a_user_may_leave_it_open():
    assert all(one.default is not MISSING for group in GROUPS for one in settings_of(group))
    assert config.EngineConfig(64, 9) == config.EngineConfig(max_model_len=64, kv_blocks=9)


def test_a_gateways_process_is_given_what_was_asked():
    """As JSON, which has no tuples and no sets."""
    lists = {"changing_lines": ("off",), "api_keys": ("k",), "admin_keys": ("a",), "origins": ("o", "p")}
    options = options_of(["one", "two"], "folder", ServerSettings(hosts=frozenset({"h", "i"}), **lists))
    told = GatewayOptions.from_plain(json.loads(json.dumps(options.to_plain())))
    assert told == options and told.settings.left_out_lines == ()


def test_a_stop_is_over_before_docker_kills():
    """Ten seconds after SIGTERM: answers end, gateways say so, nodes that do not go are killed."""
    assert (
        ServerSettings().drain_seconds + http._TO_SAY_SO + keeper._TERM_SECONDS + keeper._KILL_SECONDS < 10.0
    )


def test_devices_of_an_attention_node_are_asked_for_as_of_vllm():
    for flag in ("--tensor-parallel", "--tensor-parallel-size"):
        assert asked(flag, "2").wishes.engine.tensor_parallel == 2
