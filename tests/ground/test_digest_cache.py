"""Digests that are remembered: never of a file that changed, never from somebody else, never a reason to fail."""

import json
import os
import stat
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afserve import digest_cache
from afserve.digest_cache import FILE, DigestCache, user_folder

ENTRY = {"bytes": "00ff"}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(b"weights")
    return path


def cache(tmp_path):
    return DigestCache(tmp_path / "cache" / "afserve", settle_seconds=0.0)


def saved(tmp_path, file):
    first = cache(tmp_path)
    first.put(file.stat(), "all", ENTRY)
    first.save()
    return tmp_path / "cache" / "afserve" / FILE


def test_remembered_by_another_process(tmp_path, file):
    assert cache(tmp_path).get(file.stat(), "all") is None
    path = saved(tmp_path, file)
    assert cache(tmp_path).get(file.stat(), "all") == ENTRY
    assert cache(tmp_path).get(file.stat(), "other") is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == [FILE]


@pytest.mark.parametrize("change", ["touched", "replaced", "cut", "rewritten in place with its old time"])
def test_another_file_is_not_remembered(tmp_path, file, change):
    before = file.stat()
    saved(tmp_path, file)
    time.sleep(0.02)
    if change == "touched":
        os.utime(file)
    elif change == "replaced":
        other = tmp_path / "other"
        other.write_bytes(b"WEIGHTS")
        os.utime(other, ns=(before.st_mtime_ns, before.st_mtime_ns))
        other.replace(file)
    elif change == "cut":
        os.truncate(file, 3)
        os.utime(file, ns=(before.st_mtime_ns, before.st_mtime_ns))
    else:
        file.write_bytes(b"WEIGHTS")
        os.utime(file, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert cache(tmp_path).get(file.stat(), "all") is None


def test_a_file_that_changed_just_now_is_not_remembered(tmp_path, file):
    fresh = DigestCache(tmp_path / "cache", settle_seconds=60.0)
    fresh.put(file.stat(), "all", ENTRY)
    fresh.save()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "\xff", "[" * 100_000, '{"version": 1}', '{"version": 1, "entries": [1]}',
        '{"version": 2, "entries": {}}', '{"version": 1, "entries": {"KEY": 5}}',
        '{"version": 1, "entries": {"KEY": {"bytes": 5}}}', '{"version": 1, "entries": {"KEY": {"bytes": ["x"]}}}',
        " " * (digest_cache.MOST_BYTES + 1),
    ],
)  # fmt: skip
def test_what_is_no_cache_is_as_good_as_none(tmp_path, file, text):
    path = saved(tmp_path, file)
    key = digest_cache.key_of(file.stat(), "all")
    path.write_bytes(text.replace("KEY", key).encode("latin-1"))
    assert cache(tmp_path).get(file.stat(), "all") is None
    saved(tmp_path, file)
    assert cache(tmp_path).get(file.stat(), "all") == ENTRY


ANY = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_any_json_is_harmless(tmp_path, value):
    file = tmp_path / "shard"
    file.touch()
    path = saved(tmp_path, file)
    path.write_text(json.dumps({"version": 1, "entries": value}))
    found = cache(tmp_path).get(file.stat(), "all")
    assert found is None or all(isinstance(v, str) for v in found.values())


@pytest.mark.parametrize("kind", ["writable folder", "writable file", "a link", "a pipe", "a folder"])
def test_what_others_could_have_written_is_not_read(tmp_path, file, kind):
    path = saved(tmp_path, file)
    if kind == "writable folder":
        path.parent.chmod(0o777)
    elif kind == "writable file":
        path.chmod(0o666)
    else:
        moved = path.rename(tmp_path / "elsewhere")
        if kind == "a link":
            path.symlink_to(moved)
        elif kind == "a pipe":
            os.mkfifo(path)
        else:
            path.mkdir()
    assert cache(tmp_path).get(file.stat(), "all") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_somebody_else_is_not_read(tmp_path, file):
    path = saved(tmp_path, file)
    os.chown(path, 12345, -1)
    assert cache(tmp_path).get(file.stat(), "all") is None
    os.chown(path, 0, -1)
    os.chown(path.parent, 12345, -1)
    assert cache(tmp_path).get(file.stat(), "all") is None
    other = cache(tmp_path)
    other.put(file.stat(), "more", ENTRY)
    other.save()
    assert "more" not in path.read_text()


def test_without_a_place_to_keep_it_nothing_is_kept(tmp_path, file):
    (tmp_path / "cache").write_text("a file where the folder would be")
    for some in (cache(tmp_path), DigestCache(None)):
        some.put(file.stat(), "all", ENTRY)
        some.save()
        assert some.get(file.stat(), "all") is None


def test_the_oldest_entries_go(tmp_path, file, monkeypatch):
    monkeypatch.setattr(digest_cache, "MOST_ENTRIES", 3)
    for number in range(5):
        one = cache(tmp_path)
        one.put(file.stat(), str(number), ENTRY)
        one.save()
    kept = [n for n in range(5) if cache(tmp_path).get(file.stat(), str(n)) is not None]
    assert kept == [2, 3, 4]


@pytest.mark.slow
def test_writers_at_once_leave_a_whole_file(tmp_path, file):
    def write(writer):
        for number in range(20):
            one = cache(tmp_path)
            one.put(file.stat(), f"{writer}-{number}", ENTRY)
            one.save()
            assert cache(tmp_path).get(file.stat(), "missing") is None

    raised = []
    threads = [threading.Thread(target=lambda w=w: _noting(raised, write, w)) for w in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not raised
    entries = json.loads((tmp_path / "cache" / "afserve" / FILE).read_text())["entries"]
    assert entries and all(entry == ENTRY for entry in entries.values())
    assert os.listdir(tmp_path / "cache" / "afserve") == [FILE]


def _noting(raised, work, argument):
    try:
        work(argument)
    except BaseException as error:  # noqa: BLE001  told to the test
        raised.append(error)


def test_the_folder_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_folder() == tmp_path / "afserve"
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert user_folder() == tmp_path / "home" / ".cache" / "afserve"
