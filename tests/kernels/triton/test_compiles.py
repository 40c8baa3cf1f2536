"""Every kernel, with the tiles the tables choose, compiles for each chip generation and fits its shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.process
@pytest.mark.parametrize("arch", LIMIT)
def test_kernels_compile(arch, tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HERE.parents[2])}
    command = [sys.executable, str(HERE / "compile_for.py"), str(arch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    for kernel in kernels:
        assert kernel["shared"] <= LIMIT[arch], kernel
        assert kernel["stack"] <= 384, kernel  # bytes of spilled registers per thread
    if arch == 90:  # large tiles must reach the warpgroup instructions, in 16-bit and in FP8
        for name, instruction in (
            ("_gate_up", "HGMMA"),
            ("_down", "HGMMA"),
            ("_gate_up", "QGMMA"),
            ("_down", "QGMMA"),
        ):
            assert any(k["kernel"] == name and instruction in k["matrix"] for k in kernels), (
                name,
                instruction,
            )
        assert any(k["kernel"] == "_chunks" and "HGMMA" in k["matrix"] for k in kernels)
