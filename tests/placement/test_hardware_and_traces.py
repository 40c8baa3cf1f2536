"""Hardware files, lengths, traces: what is read, and how mistakes are named."""

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from afserve.cli.plan.catalog import load_curves, load_hardware, load_model
from afserve.errors import ConfigError
from afserve.placement.planner.perf.curve import of_isa
from afserve.placement.planner.perf.engine import Rates, scaled
from afserve.placement.planner.perf.ffn import expert_layer
from afserve.placement.planner.perf.hardware import Hardware, hardware_from_table
from afserve.placement.planner.perf.trace_reader import read_trace
from afserve.placement.planner.perf.workload import Lengths, from_lengths, parse_lengths

CONFIGS = Path(__file__).parents[2] / "configs/hardware"
TRACES = Path(__file__).parents[3] / "shared/data/request_traces"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_file_loads_and_sources_each_figure(path: Path) -> None:
    table = tomllib.loads(path.read_text())
    chip = hardware_from_table(path.name, table)
    figures = {**table["chip"], "link_gb_s": 0, "network_gb_s": 0}
    assert set(figures) <= set(table["source"])
    assert chip.flops("fp8") >= chip.flops("bf16") > 0
    assert chip.flops("int4") == chip.flops("bf16")


def test_a_chip_without_fp8_units_computes_it_in_bf16() -> None:
    a800 = load_hardware("a800")
    assert a800.flops("fp8") == a800.flops_bf16 == a800.flops("fp4")


def test_experts_on_a_cpu_go_by_its_instructions() -> None:
    curves, shape = load_curves("h200"), load_model("deepseek-v3")

    def seconds(host: Hardware, precision: str, rows: float) -> float:
        one = np.array([1.0])
        return float(expert_layer(shape, host, curves, precision, rows * one, one)[0])

    for name in ("cpu-host", "cpu-ddr5-8ch", "cpu-avx2-16ch", "cpu-grace"):
        host = load_hardware(name)
        read = shape.experts.elems * 0.5625 / host.bandwidth
        assert read < seconds(host, "int4", 1) < 2.7 * read, "one row waits for weights"
        assert seconds(host, "bf16", 1) > 1.6 * seconds(host, "int4", 1)
        assert seconds(host, "int4", 512) > 3 * seconds(host, "int4", 1), "many rows wait for products"
        assert ("not measured" in curves.of_experts(host.isa, "int4").source) == (name == "cpu-grace")
        slow = replace(host, bandwidth=host.bandwidth / 2)
        assert seconds(slow, "int4", 1) > 1.8 * seconds(host, "int4", 1), "a host with one of two sockets"
    assert (
        curves.of_experts("", "fp8") is curves.of_experts("generic", "fp8") is curves.pick("experts", "fp8")
    )


def test_no_kernel_computes_more_than_a_peak() -> None:
    curves = {name: one for name, one in load_curves("h200").curves.items() if of_isa(name)}
    assert len(curves) == 12
    assert all(0 < one.compute <= 1 and 0 < one.memory <= 1 for one in curves.values())


def test_kernels_of_a_cpu_are_not_stretched_by_an_engine_of_gpus() -> None:
    curves = load_curves("h200")
    reached = scaled(curves, Rates(experts=3.0))
    assert reached.of_experts("avx2", "int4") == curves.of_experts("avx2", "int4")
    assert reached.of_experts("", "fp8").scale == 3.0
    assert curves.knows("avx2") and not curves.knows("sve")


def test_an_instruction_set_that_is_none_is_refused() -> None:
    text = (CONFIGS / "cpu-host.toml").read_text()
    table = tomllib.loads(text.replace('"avx512bf16"', '"avx512_bf16"'))
    with pytest.raises(ConfigError, match=r"mine.toml: \[meta\] isa is 'avx512_bf16'.* use one of amx, "):
        hardware_from_table("mine.toml", table)


def test_alias_and_price() -> None:
    assert load_hardware("h200_sxm").name == "h200"
    assert load_hardware("h200").priced(9.0).usd_per_hour == 9.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chip": {"memory_gb": "80"}}, r"\[chip\]: memory_gb must be a number"),
        ({"chip": {"memory_gb": 0}}, r"memory_gb must be at least"),
        ({"node": {"devices": 1.5}}, r"\[node\]: devices must be a whole number"),
        ({"node": {"devices": 8, "fast_domain": 8, "network_gb_s": 50}}, "link_gb_s must be above 0"),
    ],
)
def test_odd_figures_are_named(change: dict[str, dict[str, object]], words: str) -> None:
    table = tomllib.loads((CONFIGS / "h800.toml").read_text())
    for section, values in change.items():
        table[section] = {**table[section], **values} if section == "chip" else values
    with pytest.raises(ConfigError, match=words):
        hardware_from_table("mine.toml", table)


def test_mooncake_and_azure_lines() -> None:
    work = read_trace(
        "t.jsonl",
        [
            '{"timestamp": 2000, "input_length": 100, "output_length": 10}',
            "",
            '{"timestamp": 1000, "input_length": 300, "output_length": 30}',
        ],
    )
    assert work.arrival.tolist() == [0.0, 1.0]
    assert work.prompt.tolist() == [300.0, 100.0]
    # answers weigh 30 and 10: contexts 315 and 105
    assert work.context_mean == pytest.approx((30 * 315 + 10 * 105) / 40)
    azure = read_trace(
        "t.csv",
        [
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2023-11-16 18:15:46.6805900,374,44",
            "2023-11-16 18:15:50.9951690,396,109",
        ],
    )
    assert azure.arrival[1] == pytest.approx(4.314579, abs=1e-4)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "t: the trace is empty"),
        (['{"timestamp": 1}'], "t:1: not a request"),
        (['{"timestamp": 1, "input_length": 5, "output_length": 5}', "{"], "t:2: not a request"),
        (["TIMESTAMP,ContextTokens", "1,2"], "t:1: the header lacks GeneratedTokens"),
        (["arrival_s,input_tokens,output_tokens", "0,5,5", "1,x,5"], "t:3: cannot read"),
        (["arrival_s,input_tokens,output_tokens", "0,-5,5"], r"t:2: .*-5.* is not a time"),
        (["arrival_s,input_tokens,output_tokens", "nan,5,5"], "t:2: .*nan.* is not a time"),
        (['{"timestamp": Infinity, "input_length": 5, "output_length": 5}'], "t:1: .*inf.* is not a time"),
        (['{"timestamp": 1, "input_length": 1e308, "output_length": 5}'], "t:1: .*two lengths of 0 to 1e.08"),
        ([f'{{"timestamp": 1, "input_length": {"9" * 400}, "output_length": 5}}'], "t:1: not a request"),
        (['{"a":' * 100_000], "t:1: not a request"),
        (["arrival_s,input_tokens,output_tokens"], "a header and no request"),
    ],
)
def test_malformed_traces_name_file_and_line(lines: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_trace("t", lines)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces are not here")
def test_real_traces() -> None:
    conversation = read_trace("m", (TRACES / "mooncake_conversation_trace.jsonl").read_text().splitlines())
    azure = read_trace("a", (TRACES / "AzureLLMInferenceTrace_conv.csv").read_text().splitlines())
    assert (len(conversation.prompt), len(azure.prompt)) == (12031, 19366)
    assert np.ptp(conversation.arrival) == pytest.approx(3537, rel=0.01)


def test_lengths_are_drawn_with_their_mean_and_deviation() -> None:
    for text in ("lognormal 1000 800", "uniform:1000:300", "exponential 1000"):
        lengths = parse_lengths(text, "input")
        drawn = lengths.sample(np.random.default_rng(0), 40000)
        assert drawn.mean() == pytest.approx(1000, rel=0.03)
        assert drawn.std() == pytest.approx(lengths.deviation, rel=0.05)
    work = from_lengths(Lengths(1000), Lengths(200))
    assert work.context_mean == pytest.approx(1100)
    assert work.context_deviation == pytest.approx(200 / 12**0.5)
    for wrong in ("many", "lognormal 5", "gamma 1 2"):
        with pytest.raises(ConfigError, match="--output: cannot read"):
            parse_lengths(wrong, "output")
