"""The commands without a server: help, errors in one line, configuration files, doctor, version, bench figures."""

import io
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from rich.console import Console

from afserve.cli import top
from afserve.cli.bench.case import Case, prompts
from afserve.cli.bench.figures import Timeline, figures, spread
from afserve.cli.bench.report import BenchRow, record, table
from afserve.cli.config_file import config_file
from afserve.cli.main import COMMANDS, LazyGroup, run
from afserve.cli.options import existing_file
from afserve.cli.status import row
from afserve.kernels import isa


def said(capsys, *arguments: str) -> tuple[int, str, str]:
    code = run(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_help_lists_every_command_and_imports_nothing_heavy():
    code = (
        "import sys, afserve.cli.main as m; m.run(['--help']); m.run(['up', '--help']); m.run(['tune', '--help']);"
        "print([n for n in ('torch', 'grpc', 'rich', 'numpy', 'uvicorn', 'httpx') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]")
    for name in ("up", "chat", "complete", "status", "bench", "node", "doctor", "tune", "version"):
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(capsys, name):
    code, out, _ = said(capsys, name, "--help")
    assert code == 0 and "Usage: afserve" in out


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["nonsense"], "nonsense"),
        (["up", "--attention", "x"], "--attention"),
        (["up", "--port", "70000"], "--port"),
        (["up", "--dtype", "int3"], "--dtype"),
        (["up", "--expert-dtype", "int3"], "--expert-dtype"),
        (["up", "--colocated", "--wire-dtype", "fp8"], "--wire-dtype fp8: a colocated run sends no rows"),
        (["up", "--block-size", "0"], "--block-size"),
        (
            ["up", "nano", "--load-format", "dummy", "--layers", "3", "--draft", "mtp"],
            "--draft mtp: the layer of multi-token prediction stands behind all layers",
        ),
        (["up", "--max-waiting", "0"], "--max-waiting"),
        (["up", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["node", "--role", "expert"], "--join"),
        (["bench", "decode", "--batch", "1,x"], "1,x"),
        (["bench", "decode", "--batch", "9" * 5000], "is not a list of numbers"),
        (["bench", "decode", "--batch", "\u00b2"], "is not a list of numbers"),
        (["bench", "decode", "--model", "a" * 5000], "neither a folder"),
        (["bench", "decode", "--model", "x\ny"], r"'x\ny'"),
        (["bench", "decode", "--model", "x\x1b[2J"], r"'x\x1b[2J'"),
        (["bench", "decode", "--model", "~nobody-here"], "--model ~nobody-here: neither"),
        (["no\x1b[2Jnsense"], r"no\x1b[2Jnsense"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, arguments, wanted):
    code, _, err = said(capsys, *arguments)
    assert code == 2
    assert err.startswith("error: ") and wanted in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "command", [["up"], ["bench", "decode"], ["bench", "pipeline"], ["node", "--role", "expert"]]
)
def test_an_instruction_set_that_is_not_here_is_refused_at_once(capsys, monkeypatch, tmp_path, command):
    monkeypatch.setattr(isa, "isas_here", lambda: ("avx2", "generic"))
    if command[0] == "node":
        (tmp_path / "token").write_text("0" * 64)
        command = [*command, "--join", "127.0.0.1:1", "--token-file", str(tmp_path / "token")]
    code, _, err = said(capsys, *command, "--isa", "amx")
    assert code == 2 and "--isa: amx does not run on" in err and "which has avx2, generic" in err


def test_a_missing_command_module_is_not_listed():
    group = LazyGroup({"gone": ("afserve.cli.gone:gone", "?"), "version": COMMANDS["version"]}, "g", "h")
    assert group.list_commands(click.Context(group)) == ["version"]


@click.command()
@click.option("--kv-tokens", type=int)
@click.option("--model", default="nano")
@click.option("--config", type=existing_file, expose_value=False, is_eager=True, callback=config_file)
def sample(kv_tokens: int, model: str) -> None:
    print(kv_tokens, model)


@pytest.mark.parametrize(
    ("text", "arguments", "printed"),
    [
        ("kv-tokens = 5\nmodel = 'x'", [], "5 x"),
        ("kv_tokens = 5", ["--kv-tokens", "7"], "7 nano"),
    ],
)
def test_a_file_gives_defaults_and_flags_win(tmp_path: Path, capsys, text, arguments, printed):
    (tmp_path / "c.toml").write_text(text)
    sample.main(["--config", str(tmp_path / "c.toml"), *arguments], standalone_mode=False)
    assert capsys.readouterr().out.strip() == printed


@pytest.mark.parametrize(
    ("text", "wanted"), [("kv_token = 5", "kv_token"), ("model = [1]", "single"), ("=", "c.toml")]
)
def test_a_bad_file_names_the_key(tmp_path: Path, capsys, text, wanted):
    (tmp_path / "c.toml").write_text(text)
    code, _, err = said(capsys, "up", "--config", str(tmp_path / "c.toml"))
    assert code == 2 and wanted in err


def test_version_and_doctor_speak_json(capsys):
    code, out, _ = said(capsys, "version", "--json")
    assert code == 0 and {"afserve", "python", "torch"} <= set(json.loads(out))
    code, out, _ = said(capsys, "doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(out)}
    assert code == 0
    assert {"processor", "memory", "torch", "kernels", "instructions", "data plane", "afserve up"} <= set(
        findings
    )
    assert all(f["advice"] for f in findings.values() if f["level"] == "missing")


def test_status_rows_of_both_roles():
    common = {"name": "n", "state": "ready", "pid": 7, "heartbeat_age": 0.25, "resident_bytes": 3 << 20}
    stats = {"running": 2, "waiting": 1, "kv_blocks": 8, "kv_blocks_used": 2, "generated_tokens": 99}
    assert row({**common, "role": "attention", "stats": stats})[3:9] == (
        "3",
        "0.2 s",
        "2",
        "1",
        "25%",
        "99",
    )
    assert row({**common, "role": "expert", "stats": {"rows": 1234, "busy_seconds": 1.0}})[-2:] == (
        "1,234",
        "1.0 s",
    )


def test_a_gateway_has_a_row_without_counts():
    node = {"name": "gateway-0", "role": "gateway", "state": "ready", "pid": 7, "heartbeat_age": 0.25}
    node |= {"resident_bytes": 3 << 20, "stats": None}
    assert row(node) == ("gateway-0", "ready", "7", "3", "0.2 s", "", "", "", "", "", "")
    assert top.row(node, node, 2.0) == ("gateway-0", "ready", 3, "", "", "", "", "", "")


def test_top_shows_what_happened_since():
    def node(role, **stats):
        return {"name": role, "role": role, "state": "ready", "resident_bytes": 5 << 20, "stats": stats}

    kv = {"kv_blocks": 4, "kv_blocks_used": 1, "running": 2, "waiting": 0}
    before = {
        "nodes": [node("attention", generated_tokens=100, **kv), node("expert", rows=0, busy_seconds=1.0)]
    }
    after = {
        "model": {"id": "m"},
        "epoch": 3,
        "nodes": [node("attention", generated_tokens=500, **kv), node("expert", rows=1000, busy_seconds=2.0)],
    }
    assert top.row(after["nodes"][0], before["nodes"][0], 2.0)[3:7] == (2, 0, "25%", 200)
    assert top.row(after["nodes"][1], before["nodes"][1], 2.0)[-2:] == (500, "50%")
    console = Console(width=200, file=io.StringIO())
    console.print(top.table(after, before, 2.0, 200))
    assert "200 tokens/s" in console.file.getvalue()


def test_a_node_without_a_controller_says_so(tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "token").write_text("t")
    monkeypatch.setattr("afserve.control.node.stream.CONNECT_SECONDS", 0.2)
    code, _, err = said(
        capsys, "node", "--role", "expert", "--join", "127.0.0.1:9", "--token-file", str(tmp_path / "token")
    )
    assert code == 1 and "127.0.0.1:9" in err


def test_the_steady_state_is_where_all_decode():
    slow = Timeline(0.0, (1.0, 2.0, 3.0, 4.0))
    late = Timeline(0.0, (2.0, 2.5, 3.0, 3.5))
    found = figures([slow, late])  # from 2.0, when both have begun, to 3.5, when one is done
    assert found.tokens_per_second == pytest.approx((1 + 3) / 1.5)
    assert (found.ttft, found.tpot) == (1.5, pytest.approx((1.0 + 0.5) / 2))
    assert figures([Timeline(0, (1.0, 2.0)), Timeline(0, (5.0, 6.0))]).tokens_per_second is None
    assert spread([3.0, None, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert spread([None]) == (None, None, None)


def test_prompts_are_seeded_and_differ():
    assert prompts(100, 3, 8, 1) == prompts(100, 3, 8, 1) != prompts(100, 3, 8, 2)
    assert len({tuple(prompt) for prompt in prompts(100, 64, 8, 1)}) == 64


def test_a_row_carries_where_and_when():
    one = BenchRow("afd", 8, 123.4567891, 1.0, None, 0.1, 0.2, 3.0, {"attention-0": 5.0})
    line = record(one, Case("/x/model", (8,), 4, 4, 1))
    assert line["tokens_per_second"] == 123.45679 and line["model"] == "model"
    assert line["machine"] and line["commit"] and line["date"].endswith("Z")
    assert table([one]).row_count == 1
