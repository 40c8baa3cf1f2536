"""Prompts that several prefill devices read together: what a plan says of them is what the servers decide by."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.cli.main import run
from afserve.comm.kv import split
from afserve.engine.kv.moving.prompt_place import PromptQueue, SplitPrompt
from afserve.launch.plan.cluster import read_cluster
from afserve.placement.planner.perf.prefill import MOST_PARTS, PrefillInstance
from bench.rows import rows

LONG = "--model qwen3-30b-a3b --tpot 30ms --input 16000 --output 200 --prompts apart --kind afd"


def call(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    code = run(line.split())
    out = capsys.readouterr()
    return code, out.out, out.err


def one_reader(
    tokens: float, seconds: float, chunk: float, layers: int, moved: float, experts: float = 0.0
) -> PrefillInstance:
    return PrefillInstance(
        1.0,
        np.array([seconds]),
        np.array([seconds]),
        moved,
        0.0,
        np.array([experts]),
        min(chunk / tokens, 1.0),
        1 / layers,
    )


def test_as_many_parts_as_nodes_compute_together() -> None:
    assert MOST_PARTS == split.MOST_PARTS


@given(
    tokens=st.integers(64, 200_000),
    chunk=st.integers(16, 8192),
    layers=st.integers(1, 100),
    rate=st.floats(10, 1e5),
    transfer=st.floats(0, 100),
    parts=st.integers(2, MOST_PARTS),
)
def test_a_split_takes_what_the_server_predicts(
    tokens: int, chunk: int, layers: int, rate: float, transfer: float, parts: int
) -> None:
    """Without a queue, and with experts that are in nobody's way."""
    server = SplitPrompt(tokens, chunk, layers, transfer).seconds([PromptQueue(0.0, rate)] * parts, rate)
    shared = one_reader(tokens, tokens / rate, chunk, layers, transfer * 1e9).among(parts, 1e9)
    assert float(shared.latency[0]) + transfer == pytest.approx(server)
    assert shared.size == shared.parts == parts


def test_played_splits_are_no_slower_than_planned() -> None:
    """Rows of `bench.split_prompts`: the engine's own split and messages, over layers of known length."""
    played = [row for row in rows("split_prompts") if row["nodes"] > 1]
    assert played
    for row in played:
        alone = row["tokens"] / row["chunk"] * row["layers"] * row["layer"]
        moved = float(row["tokens"] * row["layers"] * row["kept"])
        shared = one_reader(row["tokens"], alone, row["chunk"], row["layers"], moved).among(
            row["nodes"], row["link"]
        )
        assert float(shared.latency[0]) == pytest.approx(row["predicted"], rel=0.01)
        assert row["seconds"] <= float(shared.latency[0])


@given(experts=st.floats(0.1, 0.9), parts=st.integers(2, MOST_PARTS))
def test_no_number_of_devices_shortens_the_experts(experts: float, parts: int) -> None:
    shared = one_reader(8000, 1.0, 500, 50, 0.0, experts).among(parts, 1e9)
    assert max(experts, 1 / parts) <= float(shared.latency[0]) < max(experts, 1 / parts) + 1 / 50
    assert float(shared.seconds[0]) * parts >= 1.0, "together they have as much to do"


@pytest.mark.slow
def test_the_fewest_devices_that_meet_the_target_share_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    parts = []
    for target in (4000, 1500, 800, 600):
        best = json.loads(call(capsys, f"plan {LONG} --pool h20=16 --ttft {target}ms --json")[1])["best"]
        assert best["ttft_ms"] <= target
        assert (best["prompt_parts"] == 1) == (best["ttft_one_part_ms"] <= target)
        assert best["prefill"]["devices"] % best["prompt_parts"] == 0
        parts.append(best["prompt_parts"])
    assert parts[0] == 1 and parts == sorted(parts) and parts[-1] > 2


@pytest.mark.slow
def test_a_split_is_told_played_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, asked = tmp_path / "cluster.toml", f"{LONG} --pool h20=16 --ttft 600ms"
    code, out, err = call(capsys, f"plan {asked} --cluster {file}")
    best = json.loads(call(capsys, f"plan {asked} --json")[1])["best"]
    assert code == 0 and not err and f"{best['prompt_parts']} of them read each prompt together" in out
    assert "--ttft 0.6" in out and "# Start it with --ttft 0.6:" in file.read_text()
    cluster = read_cluster(file, placeholders=True)
    assert cluster.prefill == best["prefill"]["devices"]
    assert cluster.attention == best["prefill"]["devices"] + best["attention"]["devices"]
    assert cluster.hosts[0].address == "prefill-0.example" and cluster.hosts[0].role == "attention"
    code, out, _ = call(capsys, f"simulate {asked} --steps 3 --requests 80 --json")
    values = json.loads(out)
    assert code == 0 and f"{best['prompt_parts']} on each" in values["plan"]
    assert values["ttft_ms"]["p50"] < best["ttft_one_part_ms"] / 2


@pytest.mark.slow
def test_a_plan_on_one_machine_has_one_host_of_attention(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    assert call(capsys, f"plan {LONG} --pool h20=8 --ttft 5s --cluster {file}")[0] == 0
    cluster = read_cluster(file)
    assert [host.role for host in cluster.hosts] == ["attention", "experts"] and cluster.prefill


@pytest.mark.slow
def test_wide_keys_on_a_slow_link_are_not_split(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, f"plan {LONG} --pool h20=16 --ttft 1s --network 0.2")
    assert code == 2 and "A prompt on several h20 is not read sooner: that moves" in err
    assert "GB of keys and values over 0.2 GB/s" in err and err.count("\n") == 1
    code, _, err = call(capsys, f"plan {LONG} --pool h20=16 --ttft 10ms")
    assert code == 2 and "h20 together would have a prompt read in" in err


@pytest.mark.slow
def test_without_a_target_nothing_is_split(capsys: pytest.CaptureFixture[str]) -> None:
    best = json.loads(call(capsys, f"plan {LONG} --pool h20=16 --json")[1])["best"]
    assert best["prompt_parts"] == 1 and math.isclose(best["ttft_one_part_ms"], best["ttft_ms"])
