"""`bench.gpu_first_run` without a GPU: its order, its deadlines, and what it says when something is wrong."""

import json

import pytest

from bench.gpu_first_run import first_run, launch, main

TOKENS = json.dumps([[1, 2], [3]])
ROW = json.dumps({"engine": "1x1", "batch": 1, "tokens_per_second": 10.0})


class Machine:
    """Answers each stage; `others` are stages that answer something else."""

    def __init__(self, others=()):
        self.others, self.calls = dict(others), []

    def __call__(self, arguments, seconds):
        assert seconds >= 0
        self.calls.append(" ".join(arguments))
        for part, answer in self.others.items():
            if part in self.calls[-1]:
                return answer
        return 0, {"tokens": f"log\n{TOKENS}\n", "engine": f"{ROW}\n"}.get(arguments[1], "")


def passing(seconds):
    return [{"file": "test_experts.py", "status": 0, "result": "5 passed"}]


def run(tmp_path, machine, tests=passing, monkeypatch=None):
    return first_run(tmp_path / "rows.jsonl", 1.0, machine, tests)


@pytest.fixture(autouse=True)
def named(monkeypatch):
    monkeypatch.setattr("bench.gpu_first_run.torch.cuda.get_device_name", lambda: "a GPU")


def test_correctness_comes_before_speed(tmp_path):
    machine = Machine()
    assert run(tmp_path, machine) == 0
    kinds = [call.split()[0].removeprefix("bench.") + " " + call.split()[1] for call in machine.calls]
    assert kinds == ["gpu_stages tokens"] * 3 + ["kernels_cuda --failures"] + ["gpu_stages engine"] * 3
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert (
        len(rows) == 3 and {row["gpu"] for row in rows} == {"a GPU"} and all("commit" in row for row in rows)
    )


@pytest.mark.parametrize("answer", [(0, json.dumps([[9]])), (1, "Traceback"), (124, "")])
def test_without_equal_tokens_nothing_is_measured(tmp_path, answer, capsys):
    machine = Machine({"tokens 1x2": answer})
    assert run(tmp_path, machine) == 1
    assert not any("engine" in call or "kernels_cuda" in call for call in machine.calls)
    assert "do not give the same tokens" in capsys.readouterr().out


def test_a_failed_test_file_is_named_and_the_rest_is_measured(tmp_path, capsys):
    failing = lambda seconds: [{"file": "test_mla.py", "status": 1, "result": "1 failed"}]  # noqa: E731
    assert run(tmp_path, Machine(), failing) == 1
    assert "0 of 1 files pass: not test_mla.py" in capsys.readouterr().out
    assert (tmp_path / "rows.jsonl").exists()


def test_elsewhere_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr("bench.gpu_first_run.torch.cuda.is_available", lambda: False)
    assert main([]) == 0
    assert capsys.readouterr().out == "not measured: no CUDA device\n"


@pytest.mark.process
def test_a_stage_really_runs():
    """On the CPU: the same program gives the same tokens colocated and over processes."""
    answers = [
        launch(("bench.gpu_stages", "tokens", name, "--device", "cpu"), 200) for name in ("colocated", "1x2")
    ]
    assert [status for status, _ in answers] == [0, 0], answers
    assert len({printed.splitlines()[-1] for _, printed in answers}) == 1


def test_a_stage_that_hangs_is_given_up():
    status, _ = launch(("timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)"), 1.0)
    assert status == 124
