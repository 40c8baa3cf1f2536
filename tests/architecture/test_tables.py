"""Tables are rendered from rows as the benchmarks write them."""

from dataclasses import replace

import pytest

from bench import arm_counts, overload, phases, split_prompts, tables_peers, tables_phases, tables_start

MADE = {"machine": "a machine", "load": 0.5, "commit": "abc", "date": "2026-01-02T03:04:05"}


def drawn(monkeypatch, section, **found):
    monkeypatch.setattr(tables_phases, "rows", lambda name: [{**row, **MADE} for row in found.get(name, ())])
    text = section()
    assert "a machine" in text and "\n| --- |" in text
    return text.splitlines()


@pytest.mark.slow
def test_phases(monkeypatch):
    cases = [replace(case, warm=0.02, period=0.1) for case in list(phases.cases())[:3]]
    handed = {"experiment": "hand-over", "model": "nano", "tokens": 2048, "runs": 3, "ttft_ms": 10.0}
    rows = [phases.run(case) for case in cases] + [{**handed, "handed_ttft_ms": 11.0, "adds": 0.1}]
    assert len(drawn(monkeypatch, tables_phases.phases, phases=rows)) == 4 + len(cases)
    assert drawn(monkeypatch, tables_phases.handover, phases=rows)[-1].endswith("| 10.0 | 11.0 | +10.0% |")


def test_a_prompt_on_several_nodes(monkeypatch):
    case = replace(next(split_prompts.cases()), tokens=512, chunk=64, layers=5)
    rows = list(split_prompts.measured(case))
    one, two, four, eight = (row["of_alone"] for row in rows)
    assert one == 1.0 and 0.5 <= two < 0.6 and 0.25 <= four < 0.4 and 0.125 <= eight < 0.3
    assert all(row["predicted"] > 0.95 * row["seconds"] for row in rows), (
        "nothing is promised that is not kept"
    )
    assert len(drawn(monkeypatch, tables_phases.split, split_prompts=rows)) == 4 + len(rows)
    slow = replace(case, link=1e6)
    assert min(row["of_alone"] for row in split_prompts.measured(slow)) == 1.0, (
        "blocks take longer than tokens"
    )


@pytest.mark.slow
def test_overload(monkeypatch):
    cases = [
        overload.Case(load, admits, warm=1.0, period=overload.BIN, prompt=200)
        for load in (4.0,)
        for admits in (False, True)
    ]
    rows = [{"places": case.places, **overload.run(case)} for case in cases]
    lines = drawn(monkeypatch, tables_phases.overload, overload=rows)
    assert len(lines) == 4 + len(cases), "what the machine did besides is no part of a case"


def test_tiers_and_routing(monkeypatch):
    restore = {"what": "restore", "shape": "nano", "bytes": 1 << 20, "by": "2 threads", "share": 0.9}
    first = {"what": "first token", "model": "nano", "tokens": 3000, "ms": {"disk": 10.0, "computed": 50.0}}
    rates = {"gb_s": {"restore": 0.9, "plain": 1.0}}
    lines = drawn(monkeypatch, tables_phases.restored, kv_tiers=[{**restore, **rates}, first])
    assert "after 10.0 ms from the disk, 50.0" in lines[-1]
    memory = {**restore, **rates, "what": "host restore"}
    later = {**first, "ms": {"host": 5.0, **first["ms"]}}
    lines = drawn(monkeypatch, tables_phases.restored, kv_tiers=[{**restore, **rates}, memory, later])
    assert "after 5.0 ms from host memory, 10.0 ms from the disk, 50.0" in lines[-1]
    assert (
        "| nano | 1 | 0.90 | 1.00 | 90% |" in lines
        and "| nano | 1 | 0.90 | 1.00 | 90% | 2 threads |" in lines
    )
    routed = {"what": "trace", "nodes": 8, "blocks": 10, "p50_s": 1.0, "p99_s": 2.0, "hits": 0.9, "busy": 0.8}
    rows = [{**routed, "router": name} for name in ("gateway", "round robin")]
    assert drawn(monkeypatch, tables_phases.routing, kv_routing=rows)[-1].startswith("| gateway |")
    moved = {
        "what": "transfer",
        "over": "tcp",
        "shape": "rows",
        "bytes": 1 << 20,
        "gb_s": {"kv": 1, "stream": 2},
    }
    moved |= {"share": 0.5, "share_spread": [0.4, 0.6]}
    last = drawn(monkeypatch, tables_phases.transfers, kv=[moved])[-1]
    assert last == "| tcp | rows | 1 | 1.00 |  | 2.00 |  | 0.50 (0.40 to 0.60) |"


def test_sections_without_rows_are_left_out(monkeypatch):
    monkeypatch.setattr(tables_phases, "rows", lambda name: [])
    assert not any(section() for section in tables_phases.SECTIONS.values())


def test_starts(monkeypatch):
    read = {"bytes": 2 * 10**9, "disk_gb_s": 1.0, "cache_gb_s": 10.0, "flags": ""}
    common = {
        "bench": "start",
        "layers": None,
        "ready_s": 4.0,
        "nano_ready_s": 2.0,
        "tok_s": 3.0,
        "together_mib": 3000,
    }
    memory = {"own_mib": {"expert-0": 2000}, "resident_mib": {"expert-0": 2100}}
    one = {**common, **read, **memory, "model": "m", "from": "disk"}
    made = {**common, **memory, "model": "n", "from": "random", "layers": 4, "flags": "--expert-dtype int4"}
    large = {
        "kind": "large",
        "model_bytes": 2 * 10**9,
        "streams": 1,
        "prompt": 8,
        "tokens": 8,
        "expert_memory": "1GiB",
    }
    large |= {"share_of_disk": 0.8, "found_in_memory": 0.5, "most_RssAnon": 10**9, "bytes_read": 10**9}
    found = [{**large, "seconds": seconds, "read_rate": seconds * 1e9} for seconds in (1.0, 3.0, 2.0)]
    of_file = {"start": (one, made), "larger_than_memory": found}
    monkeypatch.setattr(tables_start, "rows", lambda name: [{**row, **MADE} for row in of_file[name]])
    starts, beyond = tables_start.large().split("**A checkpoint larger than memory**")
    assert " | 2.0 (1.0 to 3.0) | 1.0 (1.0 to 1.0) | 2.00 (1.00 to 3.00) | 0.80 (0.80 to 0.80) | " in beyond
    drawn_lines = starts.strip().splitlines()
    assert (
        drawn_lines[-2]
        == "| m | 2.0 GB, disk | 4.0 (2.0) | 0.50 | 1.00, 10.00 | expert-0 2,000 (2,100) | 3,000 | 3.0 |"
    )
    assert (
        drawn_lines[-1] == "| n, 4 layers | random | 4.0 (2.0) |  |  | expert-0 2,000 (2,100) | 3,000 | 3.0 |"
    )
    monkeypatch.setattr(tables_start, "rows", lambda name: [])
    assert not tables_start.large()


def test_experts_beside_kt_kernel(monkeypatch):
    row = {
        "shape": "qwen3-30b-a3b",
        "form": "int4",
        "threads": 2,
        "isa": "avx512bf16",
        "us": 900.4,
        "peer": "kt-kernel 1",
    }
    row |= {
        "peer_isa": "avx512_bf16",
        "peer_us": 1800.0,
        "ratio": 2.0,
        "ratio_low": 1.9,
        "ratio_high": 2.125,
        "rounds": 5,
    }
    found = [{**row, "rows": 8, "us": 1.0}, {**row, "rows": 8}, {**row, "rows": 1, "form": "bf16"}]
    monkeypatch.setattr(
        tables_peers, "rows", lambda name: [{**each, **MADE, "isa": row["isa"]} for each in found]
    )
    lines = tables_peers.experts().splitlines()
    assert lines[2] == "| shape | kept in | threads | instructions | theirs | 1 | 8 |"
    assert lines[4].endswith("| int4 | 2 | avx512bf16 | avx512_bf16 |  | 900 / 1,800 = 2.00 (1.90 to 2.12) |")


def test_arms_loops_say_where_they_take_more(monkeypatch):
    row = {
        "weights": "Q8_0",
        "set": "neon",
        "rows": 1,
        "instructions": 0.25,
        "compiler": "g++ 1",
        "emulator": "qemu 1",
    }
    row |= {**MADE, "isa": "neon"}
    beside = row | {"peer": "llama.cpp 1", "peer_instructions": 0.5}
    found = [row, beside, {**beside, "set": "sve", "instructions": 0.75}, {**row, "rows": 4}]
    monkeypatch.setattr(tables_peers, "rows", lambda name: found)
    said, _, head, _, line = tables_peers.arm().splitlines()
    assert head == "| weights | neon, 1 row | sve, 1 row | neon, 4 rows | sve, 4 rows |"
    assert line == "| Q8_0 | 0.250 / 0.500 | 0.750 / 0.500 | 0.250 |  |"
    assert said.endswith("More than theirs take Q8_0 with sve.")
    assert arm_counts.loop_of("Q4_K", "neon") == "ggml_gemv_q4_K_8x4_q8_K"
