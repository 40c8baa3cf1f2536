"""Batch sizes of one class share their kernels: a variant that serving meets late is compiled while users wait."""

import json

import pytest

from tests.warm.interpreter import WARM

MOST = {  # by what they are for: dtypes, with and without parts to join, one chunk of pairs or several
    "_attend_latent": 2, "_decode": 2, "_join": 2, "_gate_up": 2, "_down": 2, "_place_chunk": 2, "_rms_norm": 2,
}  # fmt: skip


@pytest.mark.process
def test_a_kernel_is_compiled_once_for_all_batch_sizes():
    done = WARM.said("tests.kernels.triton.variants")
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert len(counts) >= 15
    assert {name: n for name, n in counts.items() if n > MOST.get(name, 1)} == {}


@pytest.mark.process
@pytest.mark.parametrize("name", ["v3", "qwen3", "qwen3-next", "fp8"])
def test_serving_compiles_nothing_that_was_not_compiled_before(name, tiny_checkpoint, fp8_folder):
    folder = fp8_folder if name == "fp8" else tiny_checkpoint(name)
    done = WARM.said("tests.kernels.triton.warmed", str(folder))
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["late"] == [] and found["compiled"] > 12 and found["steps"] <= 8
    assert found["unexpected"] == [], "which no thread compiled before"


@pytest.mark.process
def test_kept_launches_are_those_that_triton_would_make():
    done = WARM.said("tests.kernels.triton.launched")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["differ"] == []
    assert found["asked"] <= 3000, "of twice as many launches every second one is kept"
    assert found["late"] == 0, "prepared ones find what is kept"
    assert found["seen"] == 3, "a hook of a profiler's sees every launch"


@pytest.mark.process
def test_kernels_are_compiled_ahead_by_threads_and_not_launched():
    done = WARM.said("tests.kernels.triton.ahead")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found["threads"]) == 2 and all(name.startswith("compiler") for name in found["threads"])
    assert found["again"] == 0 and found["filled"] == [0.0, 0.0], "and new memory is 0"
