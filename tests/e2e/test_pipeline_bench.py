"""`afserve bench pipeline` on the bundled model. No times are judged."""

import json
from pathlib import Path

import pytest

from afserve.cli.bench.pipeline import setups, table
from afserve.cli.bench.pipeline_node import Setup, between
from afserve.cli.main import run
from afserve.errors import ConfigError

SHARES = ("attention_bubble", "expert_bubble", "hidden")


@pytest.mark.process
@pytest.mark.usefixtures("warm_bench_nodes")
def test_every_number_is_measured_on_two_by_one_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    sizes = ["--batch", "4", "--micro-batches", "2", "--prompt-len", "8", "--output-len", "32"]
    nodes = ["--attention", "2", "--experts", "1"]  # of three threads: more would spin in turns on few cores
    assert run(["bench", "pipeline", *nodes, *sizes, "--json", "--out", str(out)]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    together, apart = (json.loads(line) for line in out.read_text().splitlines())
    assert printed == [together, apart]
    assert {"machine", "commit", "date", "nodes", "threads", "model"} <= set(apart)
    assert together["mode"] == "colocated" and together["tok_s"] > 0
    assert apart["mode"] == "afd" and apart["batch"] == 4 and apart["micro_batches"] == 2
    for name in ("tok_s", "attention_us", "expert_us", "under_way_us", "messages_per_call"):
        assert apart[name] > 0, name
    for name in SHARES:
        assert -0.01 <= apart[name] <= 1, name
    assert table([together, apart])


def test_a_setup_survives_its_trip_to_a_process(tmp_path: Path) -> None:
    from dataclasses import asdict

    (setup,) = setups("nano", tmp_path, 1, 2, [3], 8, 16, 1)
    assert Setup.read(json.dumps(asdict(setup))) == setup
    assert setup.plan().nodes == 2 and setup.mailbox_layout().slots == setup.plan().slots_per_node()


def test_what_an_expert_node_counted_in_a_time_is_never_less_than_it_did() -> None:
    noted = [{"calls": float(calls), "now": now} for calls, now in ((0, 1.0), (5, 2.0), (9, 3.0))]
    assert between(noted, 2.5, 2.6) == {"calls": 4, "now": 1.0}
    assert between(noted, 2.0, 3.0) == {"calls": 4, "now": 1.0}
    assert between(noted, 0.5, 3.5) == {"calls": 9, "now": 2.0}


def test_a_shape_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weights"):
        list(setups("deepseek-v3", tmp_path, 1, 1, [1], 8, 16, 1))
