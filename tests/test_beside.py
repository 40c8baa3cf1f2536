"""Workers run every test once, whatever becomes of one of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "conftest.py": """
        import os, pytest
        from pathlib import Path
        from tests.beside import Beside
        def pytest_configure(config):
            config.pluginmanager.register(Beside(2))
        @pytest.fixture(scope="session", autouse=True)
        def whole():
            with open(Path(__file__).with_name("notes"), "a") as notes:
                print("begins", file=notes, flush=True)
                yield
                print("ends", file=notes)
        """,
    "test_all.py": """
        import pytest
        pytestmark = pytest.mark.slow
        @pytest.fixture(scope="module")
        def seen():
            return []
        @pytest.mark.parametrize("number", range(3))
        def test_in_order(number, seen, tmp_path):
            seen.append(number)
            assert seen == list(range(number + 1))
        def test_false(): print("a word"); assert 1 + 1 == 3
        def test_skipped(): pytest.skip("not here")
        """,
    "inner/test_dies.py": """
        import os, signal
        def test_before(): pass
        def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
        def test_behind(): pass
        """,
    "inner/test_dies_at_once.py": "import os; os._exit(3)",
    "test_unreadable.py": "raise ValueError('at its import')",
    "test_last.py": "def test_last(): pass",
}


@pytest.fixture
def project(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(re.sub("^        ", "", text, flags=re.MULTILINE))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    return tmp_path


def run(project, *words):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--color=no", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run(
        command, check=False, cwd=project, env=environment, capture_output=True, text=True, timeout=60
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.process
def test_each_test_is_told_once_and_one_that_kills_its_worker_fails(project):
    code, said = run(project)
    told = sorted(
        re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) (?:\[1\] )?(\S+?)(?::\d+)?(?: - .*|: .*|)$", said, re.M)
    )
    assert (code, told) == (
        1,
        [
            ("ERROR", "test_unreadable.py"),
            ("FAILED", "inner/test_dies.py::test_dies"),
            ("FAILED", "inner/test_dies_at_once.py"),
            ("FAILED", "test_all.py::test_false"),
            ("PASSED", "inner/test_dies.py::test_before"),
            ("PASSED", "inner/test_dies.py::test_behind"),
            *(("PASSED", f"test_all.py::test_in_order[{number}]") for number in range(3)),
            ("PASSED", "test_last.py::test_last"),
            ("SKIPPED", "test_all.py"),
        ],
    ), said
    assert "assert (1 + 1) == 3" in said and "a word" in said and "ended with -9" in said
    notes = (project / "notes").read_text().split()
    assert 1 <= notes.count("ends") < notes.count("begins"), "one was killed"


@pytest.mark.slow
@pytest.mark.process
def test_after_the_first_failure_workers_end(project):
    code, said = run(project, "-x", "test_all.py", "test_last.py")
    assert code == 1 and "1 failed" in said
    notes = (project / "notes").read_text().split()
    assert notes.count("ends") == notes.count("begins")


@pytest.mark.slow
@pytest.mark.process
def test_single_tests_may_be_asked_for(project):
    code, said = run(project, "test_all.py::test_in_order", "test_last.py", "-k", "last or 0")
    assert code == 0 and "2 passed" in said
