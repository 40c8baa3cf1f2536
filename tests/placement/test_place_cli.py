"""`afserve place` from files to table, JSON and picture; every mistake is one line and exit code 2."""

import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from click.testing import CliRunner

from afserve.cli.plan.place import place
from afserve.errors import AfserveError
from afserve.placement.placement import Placement
from afserve.placement.rebalance.record import encode_header, encode_record


def run(*args: object) -> tuple[int, str]:
    """Exit code and output, as the main program makes them of errors."""
    result = CliRunner().invoke(place, [str(a) for a in args], catch_exceptions=True, env={"COLUMNS": "160"})
    if isinstance(result.exception, AfserveError):
        return result.exception.exit_code, f"{result.exception.message}\n"
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def counts(tmp_path):
    table = np.random.default_rng(3).lognormal(6, 1, (2, 16)).astype(int)
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"counts": table.tolist()}))
    return path


@pytest.fixture
def domains(tmp_path):
    rng = np.random.default_rng(4)
    named = {name: rng.lognormal(6, 1, (2, 16)).astype(int).tolist() for name in ("day", "night", "a=b")}
    path = tmp_path / "domains.json"
    path.write_text(json.dumps({"counts": named}))
    return path


def test_json_is_the_placement_file_itself(counts):
    code, out = run("--counts", counts, "--nodes", 4, "--slots", 20, "--json")
    raw, table = json.loads(out), np.array(json.loads(counts.read_text())["counts"])
    assert code == 0
    assert raw["nodes"] == 4
    assert len(raw["layers"]) == 2
    for layer, load in zip(raw["layers"], table, strict=True):
        assert [len(row) for row in layer["slots"]] == [5] * 4
        rows = [
            sum(s * load[e] for e, s in zip(*pair, strict=True))
            for pair in zip(layer["slots"], layer["share"], strict=True)
        ]
        assert max(rows) == pytest.approx(layer["max_load"])
        assert layer["max_load"] == pytest.approx(layer["lower_bound"])
    assert Placement.from_json(out).experts == 16


def test_the_table_says_how_good_it_is(counts):
    code, out = run("--counts", counts, "--nodes", 4)
    assert code == 0
    assert "0.00% above the lower bound" in out
    assert "bound" in out.splitlines()[0]


@pytest.mark.slow
def test_from_what_stands_with_a_budget(counts, domains, tmp_path):
    in_force = tmp_path / "now.json"
    in_force.write_text(run("--counts", counts, "--nodes", 4, "--slots", 24, "--json")[1])
    code, out = run(
        "--counts",
        domains,
        "--nodes",
        4,
        "--slots",
        24,
        "--scenario",
        "day",
        "--current",
        in_force,
        "--moves",
        6,
        "--json",
    )
    new = Placement.from_json(out)
    assert code == 0
    assert Placement.from_json(in_force.read_text()).diff(new).moves <= 6
    assert new.epoch == 1
    code, out = run("--counts", counts, "--nodes", 4, "--slots", 24, "--current", in_force)
    assert code == 0
    assert "not worth moving" in out
    code, out = run(
        "--counts", domains, "--nodes", 4, "--slots", 24, "--current", in_force, "--expert-mib", 1e9
    )
    assert "not worth moving" in out


def test_scenarios_are_chosen_and_weighed(domains):
    code, out = run("--counts", domains, "--nodes", 4, "--scenario", "night=3", "--scenario", "a=b")
    assert code == 0
    assert "2 scenario(s): night, a=b" in out
    assert run("--counts", domains, "--nodes", 4)[1].count("3 scenario(s)") == 1


def test_several_files_after_one_flag(counts, domains):
    code, out = run("--counts", counts, domains, "--nodes", 4)
    assert code == 0
    assert "4 scenario(s): counts, domains:day" in out


def test_a_scenario_may_be_one_more_file(counts, domains):
    code, out = run("--counts", counts, "--nodes", 4, "--scenario", domains)
    assert code == 0
    assert "4 scenario(s): counts, domains:day" in out


def test_a_recording_is_read_too(tmp_path):
    path = tmp_path / "live.afroute"
    path.write_bytes(encode_header("nano", 1, 4) + encode_record(1.0, 1, [[5, 1, 1, 1]]))
    assert run("--counts", path, "--nodes", 2, "--slots", 6)[0] == 0


@pytest.mark.slow
def test_wishes_on_the_command_line(counts):
    code, out = run(
        "--counts",
        counts,
        "--nodes",
        6,
        "--slots",
        36,
        "--groups",
        3,
        "--protect",
        4,
        "--dead",
        "1",
        "--json",
    )
    layer = Placement.from_json(out).layers[0]
    assert code == 0
    assert set(layer.slots[1]) == {-1}
    load = json.loads(counts.read_text())["counts"][0]
    for expert in np.argsort(load)[-4:]:
        assert len(layer.replicas(int(expert))) >= 2
    assert run("--counts", counts, "--nodes", 2, "--slots", 24, "--speed", "2,1")[0] == 0
    assert run("--counts", counts, "--nodes", 4, "--memory", 9)[0] == 0


@pytest.mark.slow
def test_the_heat_map_is_written(counts, tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "heat.png"
    assert run("--counts", counts, "--nodes", 4, "--plot", target)[0] == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    code, out = run("--counts", counts, "--nodes", 4, "--plot", tmp_path / "where.no")
    assert code == 2
    assert "cannot write" in out


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--nodes", 4, "--slots", 15], "16 experts need at least 16 slots"),
        (["--nodes", 0], "--nodes: 0 is not a whole number in [1, 65536]"),
        (["--nodes", 4, "--groups", 9], "9 groups"),
        (["--nodes", 4, "--moves", 3], "needs the current placement"),
        (["--nodes", 4, "--scenario", "dawn"], "no scenario 'dawn'"),
        (["--nodes", 4, "--scenario", "counts=x"], "'x' is not a number"),
        (["--nodes", 4, "--current", "gone.json"], "--current gone.json: cannot be read: No such file"),
        (["--nodes", 4, "--slots", 20, "--memory", 9], "not both"),
        (["--nodes", 4, "--memory", 3], "memory budget of 3"),
        (["--nodes", 4, "--speed", "1,2"], "2 values of speed for 4"),
        (["--nodes", 4, "--speed", "1,1,1,nan"], "--speed: 'nan' is not a number in [1e-06, 1e+06]"),
        (["--nodes", 4, "--dead", "7"], "dead nodes"),
        (["--nodes", 4, "--dead", "0.5"], "--dead: '0.5' is not a whole number in"),
        (["--nodes", 10**9], "--nodes: 1000000000 is not a whole number in [1, 65536]"),
        (["--nodes", 4, "--slots", 10**30], "--slots: 1000000000000000000000000000000 is not"),
        (["--nodes", 4, "--scenario", "counts=nan"], "--scenario: 'nan' is not a number in [0, 1e+09]"),
        (["--nodes", 4, "--protect", 99], "a layer has 16 experts"),
        (["--nodes", 4, "--expert-mib", -1], "--expert-mib: -1.0 is not a number in [1e-06, 1e+09]"),
        (
            ["--nodes", 4, "--slots", 1 << 20],
            "over all layers a placement has at most 262,144 nodes and 1,048,576 slots",
        ),
    ],
)
def test_a_bad_flag_is_one_line(counts, args, complaint):
    code, out = run("--counts", counts, *args)
    assert code == 2
    assert complaint in out
    assert out.count("\n") == 1


def test_the_file_may_stand_without_its_option(counts, tmp_path):
    """As `afserve place --help` writes it: [FILE]..."""
    code, out = run(counts, "--nodes", 4, "--json")
    assert code == 0
    assert run("--counts", counts, "--nodes", 4, "--json") == (0, out)
    code, out = run("--nodes", 4)
    assert code == 2
    assert out == "no routing counts to place by; give a FILE of them, or --counts FILE\n"


@pytest.mark.slow
def test_many_slots_of_one_expert_are_counted_soon(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text('{"counts": [[1, 2]]}')
    tracemalloc.start()
    code, out = run("--counts", path, "--nodes", 20_000, "--slots", 40_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert code == 0 and "13334" in out
    assert peak < 256 << 20  # every pair of the 25,002 replicas, as it was once, is 625 MB


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"counts": [[1, -2]]}', "not negative"),
        (b'{"counts": [[1, NaN]]}', "nan"),
        (b'{"counts": [[1, Infinity]]}', "inf"),
        (b'{"counts": [[1, 2], [3]]}', "ragged"),
        (b'{"counts": [[1, %s]]}' % (b"9" * 400), "that a float holds"),
        (b'{"counts": [[1, 2], [1e308, 1e308]]}', "counts of layer 1 are more than 1e+18 together"),
        (b"\xff\xfe\x00", "neither JSON text nor a routing recording"),
        (b"{", "not JSON"),
        (b"AFROUTE1", "recording"),
    ],
)
def test_a_bad_counts_file_is_one_line(tmp_path, content, complaint):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    code, out = run("--counts", path, "--nodes", 2)
    assert code == 2
    assert complaint in out
    assert "bad.json" in out
    assert out.count("\n") == 1


def test_a_map_without_a_folder_is_refused_before_the_counts_are_read(tmp_path):
    code, out = run("--counts", tmp_path / "none.json", "--nodes", 2, "--plot", tmp_path / "no" / "x.png")
    assert code == 2 and "--plot" in out and "there is no folder" in out


def test_a_placement_of_another_model_is_one_line(counts, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(Placement.contiguous(layers=3, experts=8, nodes=4).to_json())
    code, out = run("--counts", counts, "--nodes", 4, "--current", other)
    assert code == 2
    assert "another model: 3 MoE layers of 8 experts, here are 2 of 16" in out


@pytest.mark.parametrize("counts_json", ['{"counts": [[0, 0, 0, 0]]}', '{"counts": [[0, 9, 0, 0]]}'])
@pytest.mark.parametrize("slots", [4, 6, 8])
def test_no_rows_and_one_expert_with_everything(tmp_path, counts_json, slots):
    path = tmp_path / "extreme.json"
    path.write_text(counts_json)
    code, out = run("--counts", path, "--nodes", 2, "--slots", slots, "--json")
    assert code == 0
    assert Placement.from_json(out).experts == 4


@pytest.mark.slow
def test_it_starts_without_torch():
    script = (
        "import sys, afserve.cli.plan.place; assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_every_expert_on_two_hosts(counts):
    ask = ("--counts", counts, "--nodes", 4, "--nodes-per-host", 2, "--expert-copies", 2)
    placement = Placement.from_json(run(*ask, "--json")[1])
    assert placement.slots_per_node() == 9  # eight of 2 x 16 copies, and a spare one
    for layer in placement.layers:
        assert all({n // 2 for n, _, _ in layer.replicas(e)} == {0, 1} for e in range(16))
    assert "every expert has 2 copies, on different hosts" in run(*ask)[1]
    code, out = run(*ask, "--slots", 31)
    assert code == 2
    assert out == (
        "2 copies of 16 experts need 32 slots per layer, not 31 on 4 live nodes: give more slots or nodes, or fewer "
        "copies\n"
    )
    assert "need 2 live nodes, not 1" in run("--counts", counts, "--nodes", 1, "--expert-copies", 2)[1]
    assert (
        "3 hosts of 2 nodes" in run("--counts", counts, "--nodes", 5, "--nodes-per-host", 2, "--groups", 4)[1]
    )
