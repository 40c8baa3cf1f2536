"""What `make durations` counts for a test: seconds of a core, its own and those of processes below it, ended or not."""

import subprocess
import sys
import time

import pytest

from tests.spent import spent

BUSY = "import time\nwhile time.process_time() < 0.15: pass\nprint(flush=True)\ninput()"


@pytest.mark.process
def test_processes_count_while_they_live_and_when_they_have_ended() -> None:
    before = spent()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as busy:
        assert busy.stdout is not None and busy.stdout.readline()
        alive = spent() - before
        busy.communicate(b"\n")
    ended = spent() - before
    assert 0.14 <= alive <= ended + 0.02, "the kernel counts living ones in hundredths"
    began = time.process_time()
    while time.process_time() - began < 0.05:
        pass
    assert spent() - before >= ended + 0.05
