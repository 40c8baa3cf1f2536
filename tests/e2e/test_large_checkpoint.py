"""A 30B-A3B model in INT4, 17 GiB of random weights, within 24 GiB of memory: it starts and answers."""

import shutil
from pathlib import Path

import psutil
import pytest

from afserve import LLM, SamplingParams
from bench.make_int4_checkpoint import SHAPES, write

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.long]
GIB = 1 << 30
DISK, MEMORY = 19 * GIB, 24 * GIB


@pytest.fixture
def folder(tmp_path):
    if shutil.disk_usage(tmp_path).free < DISK:
        pytest.skip(f"needs {DISK // GIB} GiB of disk below {tmp_path}")
    if psutil.virtual_memory().available < 19 * GIB:
        pytest.skip("needs 19 GiB of memory that is free")
    write(SHAPES["qwen3-30b-a3b"], tmp_path / "model")
    yield tmp_path / "model"
    shutil.rmtree(tmp_path / "model")


def own_memory() -> int:
    """Of this process's children: what is not a file's page, which the system may drop at any time."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{child.pid}/status").read_text().splitlines()
        )
        total += sum(int(fields.get(name, "0 kB").split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
    return total


def test_it_fits_and_serves(folder):
    asked, greedy = [[5, 6, 7, 8], [100, 3, 9] * 40], SamplingParams(max_tokens=8, temperature=0)
    with LLM(folder, attention=1, experts=1, kv_tokens=4096, max_model_len=2048, threads=1) as llm:
        first, second = ([one.token_ids for one in llm.generate(asked, greedy)] for _ in range(2))
        assert [len(tokens) for tokens in first] == [8, 8] and first == second
        assert own_memory() < MEMORY
