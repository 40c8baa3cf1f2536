"""KV of prompts that is found: it costs its way, and not its computation."""

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from afserve.cli.plan.catalog import load_curves, load_hardware, load_model
from afserve.cli.plan.command import plan
from afserve.errors import ConfigError
from afserve.placement.planner.perf.attention import Precision, prefill_step
from afserve.placement.planner.perf.found import TIERS, Found, FoundTier, parse_found
from afserve.placement.planner.perf.kv import cache_bytes
from afserve.placement.planner.perf.prefill import decoding_only, reader
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.stages import afd_stages, prompt_seconds
from afserve.placement.planner.perf.workload import Lengths, from_lengths

CHIP, SHAPE, WIDTHS = load_hardware("h200"), load_model("deepseek-v3"), Precision(kv="bf16")
PROMPT = 4000.0
PLAIN = Setting(
    SHAPE,
    load_curves("h200", SHAPE, CHIP, WIDTHS),
    from_lengths(Lengths(PROMPT), Lengths(300)),
    precision=WIDTHS,
)
DISK = replace(PLAIN, found=Found((FoundTier("memory", 0.25), FoundTier("disk", 0.5, 2e9))))
ASKED = [
    *("--model", "deepseek-v3", "--pool", "h200=32", "--tpot", "50ms", "--ttft", "2s"),
    *("--input", "4000", "--output", "300"),
]


def test_what_is_found_is_not_computed_and_is_attended_to():
    attention, experts = prompt_seconds(DISK, CHIP, CHIP, 1, np.ones(1), np.array([16.0]))
    own = prefill_step(SHAPE, CHIP, PLAIN.curves, WIDTHS, np.array([1000.0]), 3000.0, 1)
    assert attention == pytest.approx(PLAIN.engine.rates.prompt_attention * own)
    whole, all_experts = prompt_seconds(PLAIN, CHIP, CHIP, 1, np.ones(1), np.array([16.0]))
    assert attention < 0.5 * whole and experts < all_experts


def test_it_takes_its_way_and_memory_takes_none():
    size = cache_bytes(SHAPE, WIDTHS, PROMPT)
    assert DISK.fetching == pytest.approx(0.5 * size / 2e9) and PLAIN.fetching == 0.0
    assert replace(PLAIN, found=Found((FoundTier("memory", 0.9),))).fetching == 0.0
    assert decoding_only(DISK).fetching == 0.0, "who decodes reads no prompts"


def test_a_first_token_waits_for_it_and_a_slow_tier_bounds_the_prompts():
    def stages(setting):
        return afd_stages(setting, CHIP, CHIP, 1, 2, np.array([8.0]), np.array([16.0]), np.array([16.0]))

    fast, slow = (replace(PLAIN, found=Found((FoundTier("host", 0.5, rate),))) for rate in (50e9, 1e8))
    assert stages(fast).first_token < stages(PLAIN).first_token < stages(slow).first_token
    assert stages(fast).tpot < stages(PLAIN).tpot < stages(slow).tpot
    readers = [reader(one, CHIP, CHIP, np.array([16.0])) for one in (fast, PLAIN, slow)]
    assert readers[0].seconds < readers[1].seconds < readers[2].seconds == slow.fetching
    assert readers[0].moved == readers[1].moved, "the node that decodes needs all of it"


@given(st.lists(st.tuples(st.sampled_from(TIERS), st.floats(0.01, 0.24)), unique_by=lambda one: one[0]))
def test_what_is_typed_is_what_is_found(tiers):
    texts = [f"{name}={share}" + ("" if name == "memory" else "@3") for name, share in tiers]
    found = parse_found(tuple(texts))
    assert [(tier.name, tier.share) for tier in found.tiers] == tiers
    assert found.found_share == pytest.approx(sum(share for _, share in tiers))
    assert found.fetch_seconds(3e9) == pytest.approx(sum(share for name, share in tiers if name != "memory"))


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        (("ram=0.5",), "write memory=SHARE"),
        (("disk=0.5",), "write memory=SHARE"),
        (("memory=0.5@3",), "write memory=SHARE"),
        (("disk=1.5@3",), "a share above 0 and below 1"),
        (("disk=e.e@3",), "a share above 0 and below 1"),
        (("disk=0.5@0",), "GB/s is not 0.001 to 100000"),
        (("disk=0.5@1e-400",), "GB/s is not"),
        (("disk=0.3@3", "disk=0.3@3"), "given twice"),
        (("disk=0.5@3", "memory=0.5"), "the last token of a prompt is always computed"),
    ],
)
def test_what_cannot_be_is_refused(typed, why):
    with pytest.raises(ConfigError, match=why):
        parse_found(typed)


@pytest.mark.slow
def test_a_plan_says_what_tiers_bring(tmp_path):
    def planned(*more, asked=ASKED):
        result = CliRunner().invoke(plan, [*asked, *more])
        return result.output if result.exit_code == 0 else str(result.exception)

    said = planned("--found", "host=0.5@20")
    assert "KV found: 50% host at 20 GB/s; it comes in " in said and "compute it instead" not in said
    assert "compute it instead" in planned("--found", "disk=0.5@0.3")
    assert "KV found" not in planned()
    assert "decode-only workload no prompts" in planned("--decode-only", "--found", "memory=0.5")
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,900,30\n1,800,40\n")
    assert "every prompt is computed" in planned(
        "--goodput", "--trace", str(trace), "--found", "memory=0.5", asked=ASKED[:8]
    )
