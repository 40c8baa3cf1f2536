"""What the warm interpreter forks ends, prints and is told what a process of its own would be."""

import signal
import subprocess
import tempfile

import pytest

from tests.warm.interpreter import Warm


@pytest.mark.process
def test_a_command_ends_as_one_of_its_own_does(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = Warm()
    try:
        with tempfile.TemporaryFile("w+") as printed:
            monkeypatch.setenv("AFSERVE_BLOCK_SIZE", "nothing")
            assert warm.run(["up", "--port", "0"], printed).wait(60) == 2
            monkeypatch.delenv("AFSERVE_BLOCK_SIZE")
            assert warm.run(["version"], printed).wait(60) == 0
            printed.seek(0)
            said = printed.read()
            assert "--block-size" in said and "torch" in said
            long = warm.run(["up", "--port", "0"], printed)
            assert long.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                long.wait(0.01)
            long.kill()
            assert long.wait(60) == long.poll() == -signal.SIGKILL
            long.terminate()  # nobody is left to be told
        said = warm.said("status", "--url", "http://127.0.0.1:9")
        assert said.returncode == 1 and said.stderr.startswith("error: ") and not said.stdout
        shell = [*warm.command(), "version", "--json"]
        done = subprocess.run(shell, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and '"torch"' in done.stdout
        with subprocess.Popen(
            [*warm.command(), "up", "--port", "0"], stderr=subprocess.PIPE, text=True
        ) as client:
            assert client.stderr is not None and any("ready in" in line for line in client.stderr)
            client.terminate()
            assert client.wait(60) == 0
    finally:
        warm.close()


@pytest.mark.process
def test_one_that_has_died_is_followed_by_another() -> None:
    warm = Warm("json")
    try:
        assert warm.said("--help").returncode == 0
        assert warm._process is not None
        warm._process.kill()
        assert warm.said("--help").returncode == 0
    finally:
        warm.close()
