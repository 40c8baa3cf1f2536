"""A 30B-A3B model in INT4, 17 GiB of random weights, within 24 GiB of memory: it starts and answers; a part too."""

import os
import shutil
from dataclasses import replace

import psutil
import pytest

from afserve import LLM, SamplingParams
from bench.make_int4_checkpoint import SHAPES, write
from bench.peak_memory import PeakMemory

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]
GIB = 1 << 30
SHAPE = SHAPES["qwen3-30b-a3b"]
LAYERS = SHAPE.config["num_hidden_layers"]
MEMORY = 24 * GIB
BESIDE = 2 * GIB  # interpreters, KV, buffers and what is read at the moment


@pytest.fixture(params=[4, LAYERS])
def written(request, tmp_path):
    """A folder, the bytes of its tensors, and of how many layers."""
    layers = request.param
    share = layers / LAYERS
    disk, memory = int(GIB + 18 * GIB * share), int(BESIDE + 17 * GIB * share)
    if shutil.disk_usage(tmp_path).free < disk:
        pytest.skip(f"needs {disk / GIB:.1f} GiB of disk below {tmp_path}")
    if psutil.virtual_memory().available < memory:
        pytest.skip(f"needs {memory / GIB:.1f} GiB of memory that is free")
    shape = replace(SHAPE, config=SHAPE.config | {"num_hidden_layers": layers})
    yield tmp_path / "model", write(shape, tmp_path / "model"), layers
    shutil.rmtree(tmp_path / "model")


def test_it_fits_and_serves(written):
    """Packing holds nothing twice: all processes together have what was stored and little else."""
    folder, stored, layers = written
    asked, greedy = [[5, 6, 7, 8], [100, 3, 9] * 40], SamplingParams(max_tokens=8, temperature=0)
    with (
        PeakMemory(os.getpid()) as peaks,
        LLM(folder, attention=1, experts=1, kv_tokens=4096, max_model_len=2048, threads=1) as llm,
    ):
        first, second = ([one.token_ids for one in llm.generate(asked, greedy)] for _ in range(2))
        assert [len(tokens) for tokens in first] == [8, 8] and first == second
    known = peaks.of.pop(os.getpid()).own  # pytest and what it has loaded
    together = peaks.together - known
    print(f"{layers} layers: {stored / GIB:.2f} GiB stored, at most {together / GIB:.2f} GiB in memory")
    assert together < stored + BESIDE and together < MEMORY
