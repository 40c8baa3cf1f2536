"""Output that cannot be written ends nothing: full disks, readers that have gone, descriptors that are closed."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import logging, os, sys
{before}
from rich.console import Console
from afserve.launch.processes.streams import tolerate_lost_output
from afserve.logs import configure
tolerate_lost_output()
tolerate_lost_output()
configure("info", "text")
logging.getLogger("afserve.x").warning("a line")
for stream in (sys.stdout, sys.stderr):
    print("x" * 100_000, file=stream, flush=True)
Console(stderr=True).print("[bold]banner[/bold]")
if os.fork() == 0:
    print("in a child", flush=True)
    sys.exit(0)
os._exit(7 if os.waitstatus_to_exitcode(os.wait()[1]) else 0) if {at_once} else sys.exit(0)
"""


def code_of(stdout, stderr, before="", at_once=False):
    script = SCRIPT.format(before=before, at_once=at_once)
    command = [sys.executable, "-c", script]
    return subprocess.run(command, stdout=stdout, stderr=stderr, timeout=60, check=False).returncode


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("where", ["full", "pipe"])
def test_nothing_fails_where_nothing_can_be_written(where, at_once):
    target = os.open("/dev/full", os.O_WRONLY) if where == "full" else broken_pipe()
    try:
        assert code_of(target, target, at_once=at_once) == 0
    finally:
        os.close(target)


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["1", "2", "0, 1, 2"])
def test_a_closed_descriptor_is_never_a_sockets(closed):
    before = f"for number in ({closed},): os.close(number)"
    assert code_of(subprocess.DEVNULL, subprocess.DEVNULL, before) == 0


@pytest.mark.slow
def test_what_can_be_written_comes_whole(tmp_path):
    with (tmp_path / "out").open("wb") as out:
        assert code_of(out, out) == 0
    text = (tmp_path / "out").read_text()
    assert "a line" in text and text.count("x") >= 200_000 and "banner" in text and "in a child" in text
