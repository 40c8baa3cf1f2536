"""`afserve bench pipeline` on the bundled model. No times are judged."""

import json
from pathlib import Path

import pytest

from afserve.cli.bench.pipeline import rows, setups, table
from afserve.cli.bench.pipeline_node import Setup
from afserve.cli.main import run
from afserve.errors import ConfigError

SHARES = ("attention_bubble", "expert_bubble", "hidden")


@pytest.mark.process
def test_every_number_is_measured_on_two_by_three(tmp_path: Path) -> None:
    (setup,) = setups("nano", tmp_path, 2, 3, [4], 8, 24, 1)
    together, apart = rows(setup, [2])
    assert together["mode"] == "colocated" and float(str(together["tok_s"])) > 0
    assert apart["mode"] == "afd" and apart["batch"] == 4 and apart["micro_batches"] == 2
    for name in ("tok_s", "attention_us", "expert_us", "under_way_us", "messages_per_call"):
        assert float(str(apart[name])) > 0, name
    for name in SHARES:
        assert -0.01 <= float(str(apart[name])) <= 1, name
    assert table([together, apart])


@pytest.mark.process
def test_the_command_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    sizes = ["--batch", "2", "--micro-batches", "1", "--prompt-len", "8", "--output-len", "16"]
    assert run(["bench", "pipeline", *sizes, "--json", "--out", str(out)]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert printed == kept
    assert [row["mode"] for row in kept] == ["colocated", "afd"]
    assert {"machine", "commit", "date", "nodes", "threads", "model"} <= set(kept[1])


def test_a_setup_survives_its_trip_to_a_process(tmp_path: Path) -> None:
    from dataclasses import asdict

    (setup,) = setups("nano", tmp_path, 1, 2, [3], 8, 16, 1)
    assert Setup.read(json.dumps(asdict(setup))) == setup
    assert setup.plan().nodes == 2 and setup.mailbox_layout().slots == setup.plan().slots_per_node()


def test_a_shape_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weights"):
        list(setups("deepseek-v3", tmp_path, 1, 1, [1], 8, 16, 1))
