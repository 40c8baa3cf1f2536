"""A run's folder under whatever is done to it: it is there again, with the same token, for this user only."""

import fcntl
import os
import shutil
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.launch.processes import run_folder
from afserve.launch.processes.run_folder import PREFIX, RunFolder

TOKEN, CONFIG = "a-token", '{"layers": 2}'


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(run_folder, "_LOOK_SECONDS", 0.0)
    return tmp_path


def begun():
    folder = RunFolder()
    with open(os.open(folder.path / "token", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(TOKEN)
    (folder.path / "shape").mkdir(0o700)
    (folder.path / "shape" / "config.json").write_text(CONFIG)
    weights = folder.path.parent / "weights"
    weights.touch()
    os.truncate(weights, 1 << 40)  # a link's file is in nobody's memory
    (folder.path / "shape" / "model.gguf").symlink_to(weights)
    folder.log_of("expert-0").write_text("a line")
    folder.remember()
    return folder


def is_whole(folder):
    token = folder.path / "token"
    modes = [path.stat().st_mode & 0o777 for path in (folder.path, token)]
    return (
        modes == [0o700, 0o600]
        and token.read_text() == TOKEN
        and (folder.path / "shape" / "config.json").read_text() == CONFIG
        and (folder.path / "shape" / "model.gguf").readlink() == folder.path.parent / "weights"
        and not folder.path.is_symlink()
        and is_locked(folder.path)
    )


def is_locked(path):
    """As a cleaner or another run finds it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def put_a_link(path):
    shutil.rmtree(path)
    path.symlink_to(path.parent, target_is_directory=True)


def put_a_file(path):
    shutil.rmtree(path)
    path.write_text("not yours")


def put_a_folder(path):
    shutil.rmtree(path)
    path.mkdir(0o777)
    (path / "token").write_text("not the run's")


DAMAGES = (
    shutil.rmtree,
    lambda path: (path / "token").unlink(),
    lambda path: shutil.rmtree(path / "shape"),
    lambda path: (path / "shape" / "config.json").unlink(),
    lambda path: path.rename(path.with_name("elsewhere")),
    put_a_link,
    put_a_file,
    put_a_folder,
)


def undo(folder):
    folder.remove()
    for left in folder.path.parent.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


@given(st.lists(st.sampled_from(DAMAGES), min_size=1, max_size=5))
def test_whatever_is_done_to_it_it_is_there_again(damages):
    folder = begun()
    assert is_whole(folder)
    for damage in damages:
        shutil.rmtree(folder.path.with_name("elsewhere"), ignore_errors=True)
        damage(folder.path)
        folder.look()
        assert is_whole(folder)
    undo(folder)


def test_what_was_done_is_said_once(caplog):
    folder = begun()
    shutil.rmtree(folder.path)
    for _ in range(3):
        folder.look()
    assert caplog.text.count("was removed") == 1 and str(folder.path) in caplog.text
    folder.remove()


def test_where_it_cannot_be_made_again_that_is_said_once_and_tried_on(base, caplog):
    folder = begun()
    base.rename(base.with_name("away"))
    for _ in range(3):
        folder.look()
    assert caplog.text.count("cannot be made again") == 1
    base.mkdir()
    folder.look()
    assert is_whole(folder)
    folder.remove()
    shutil.rmtree(base.with_name("away"))


def test_only_what_nobody_uses_is_swept(base, monkeypatch):
    used = begun()
    stale, other = base / f"{PREFIX}left", base / "afserve-other"
    for path in (stale, other):
        path.mkdir()
        (path / "token").write_text("old")
    (base / f"{PREFIX}link").symlink_to(other)
    young = RunFolder()
    assert stale.is_dir(), "it may be a run that has no lock yet"
    monkeypatch.setattr(run_folder, "_YOUNG_SECONDS", -1.0)
    last = RunFolder()
    assert not stale.exists() and (other / "token").exists()
    assert all(each.path.is_dir() for each in (used, young, last)) and is_whole(used)
    for each in (used, young, last):
        each.remove()
