"""The audit log: what stands in it, that its chain finds every change, and that it costs requests nothing."""

import json
import os
import threading

import httpx
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.cli.audit import audit
from afserve.errors import ConfigError
from afserve.server.http.audit_chain import START, check_chain
from afserve.server.http.audit_file import AuditFile
from afserve.server.http.audit_log import MOST_WAITING, AuditLog


def entries(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def audited(make_backend, run_server, tmp_path):
    path = tmp_path / "audit"
    with run_server(make_backend(), audit_log=str(path)) as server, httpx.Client(base_url=server.url) as http:
        yield http, path


def test_who_asked_what(audited):
    http, path = audited
    asked = {"prompt": "a secret", "max_tokens": 3}
    assert http.get("/status").json()["audit"] == START
    usage = http.post("/v1/completions", json=asked, headers={"x-request-id": "mine"}).json()["usage"]
    http.post("/v1/messages", json={"max_tokens": 2, "messages": [{"role": "user", "content": "a secret"}]})
    http.post("/v1/embeddings", json={"input": "a secret"})
    http.get("/health")
    http.get("/v1/requests/nobody")
    http.post("/v1/completions", json={"prompt": 5})
    found = wait_for(path, 5)
    first, spoken, vector, missing, refused = found
    assert first["request_id"] == "mine" and first["model"] == "tiny" and first["route"] == "/v1/completions"
    assert (
        first["prompt_tokens"] == usage["prompt_tokens"]
        and first["completion_tokens"] == usage["completion_tokens"]
    )
    assert spoken["route"] == "/v1/messages" and spoken["prompt_tokens"] > 0 and vector["prompt_tokens"] > 0
    assert missing["status"] == 404 and refused["status"] == 400 and "model" not in refused
    assert "secret" not in path.read_text() and check_chain([path]).broken is None


def wait_for(path, count):
    for _ in range(600):
        if path.exists() and len(found := entries(path)) >= count:
            return found
        threading.Event().wait(0.05)
    pytest.fail(f"{count} entries were expected in {path}")


def written(path, count):
    kept = AuditLog(str(path))
    for number in range(count):
        kept.note_request({"number": number})
    kept.finish_writing()
    return kept.file.last


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_change_is_found(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("audit") / "log"
    last, again = written(path, 6), AuditFile(str(path))
    assert last == again.last == entries(path)[-1]["hash"]
    again.close()
    lines = path.read_bytes().splitlines(keepends=True)
    at = data.draw(st.integers(0, 5))
    how = data.draw(st.sampled_from(["number", "drop", "swap", "twice", "bytes", "space", "key"]))
    if how == "number":
        lines[at] = lines[at].replace(b'"number":%d' % at, b'"number":%d' % (at + 1))
    elif how == "drop":
        at = min(at, 4)  # the last one is missed by nobody
        del lines[at]
    elif how == "swap":
        other = (at + 1) % 6
        lines[at], lines[other] = lines[other], lines[at]
    elif how == "twice":
        lines.insert(at, lines[at])
    elif how == "space":
        lines[at] = lines[at].replace(b",", b", ", 1)
    elif how == "key":  # a second one, which other readers of JSON take for the first
        lines[at] = b'{"number":7,' + lines[at][1:]
    else:
        place = data.draw(st.integers(0, len(lines[at]) - 2))
        byte = data.draw(st.integers(0, 255).filter(lambda value: value != lines[at][place] and value != 10))
        lines[at] = lines[at][:place] + bytes([byte]) + lines[at][place + 1 :]
    path.write_bytes(b"".join(lines))
    assert check_chain([path]).broken is not None


def test_gateways_share_a_file_and_it_goes_on_after_a_restart(tmp_path):
    path = tmp_path / "log"
    threads = [threading.Thread(target=written, args=(path, 40)) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    written(path, 5)
    found = check_chain([path])
    assert (found.lines, found.broken) == (125, None)


def test_what_finds_no_room_is_counted(tmp_path):
    path = tmp_path / "log"
    kept = AuditLog(str(path))
    kept.finish_writing()  # nobody writes now
    for number in range(MOST_WAITING + 7):
        kept.note_request({"number": number})
    kept._queue.get()
    kept.note_request({"number": 0})
    assert list(kept._queue.queue)[-1] == {"number": 0, "lost": 7}


def test_the_command_names_the_line(tmp_path):
    path = tmp_path / "log"
    written(path, 3)
    good = CliRunner().invoke(audit, [str(path)])
    last = entries(path)[-1]["hash"]
    assert good.exit_code == 0 and "3 lines" in good.output and last in good.output
    path.write_bytes(path.read_bytes().replace(b'"number":1', b'"number":7'))
    bad = CliRunner().invoke(audit, [str(path)])
    assert bad.exit_code == 1 and "line 2 was changed" in bad.output
    missing = CliRunner().invoke(audit, [str(tmp_path / "none")])
    assert isinstance(missing.exception, ConfigError) and "none: No such file" in str(missing.exception)


@pytest.mark.parametrize("how", ["moved", "deleted", "emptied"])
def test_what_is_done_to_the_file_shows(tmp_path, how):
    """Two gateways write; the chain goes on in a new file, and no line goes to one that nobody sees."""
    path, old = tmp_path / "log", tmp_path / "old"
    one, other = AuditFile(str(path)), AuditFile(str(path))
    one.append({"number": 0})
    other.append({"number": 1})
    old.write_bytes(path.read_bytes())
    if how == "emptied":
        os.truncate(path, 0)
    else:
        path.rename(old) if how == "moved" else path.unlink()
    (other if how == "emptied" else one).append({"number": 2})
    other.append({"number": 3})
    one.append({"number": 4})
    assert [entry["number"] for entry in entries(path)] == [2, 3, 4]
    assert check_chain([old, path]).broken is None and check_chain([old, path]).lines == 5
    alone = CliRunner().invoke(audit, [str(path)])
    assert alone.exit_code == 1 and "line 1 does not follow" in alone.output and "--after" in alone.output
    after = entries(old)[-1]["hash"]
    assert CliRunner().invoke(audit, [str(path), "--after", after]).exit_code == 0
    one.close()
    other.close()


def test_a_line_that_a_crash_has_cut_stays_a_line(tmp_path):
    path = tmp_path / "log"
    written(path, 2)
    path.write_bytes(path.read_bytes()[:-9])
    written(path, 1)
    lines = path.read_bytes().splitlines()
    assert len(lines) == 3 and json.loads(lines[2])["before"] == START
    broken = check_chain([path]).broken
    assert broken is not None and broken[1] == 2


def checked(*given):
    return CliRunner().invoke(audit, list(map(str, given)))


def test_lines_that_are_missing_at_the_end(tmp_path):
    path = tmp_path / "log"
    written(path, 5)
    whole, hashes = path.read_bytes(), [entry["hash"] for entry in entries(path)]
    alone = checked(path)
    assert alone.exit_code == 0 and "missing at the end cannot be seen" in alone.output
    known = checked(path, "--last", hashes[2], "--lines", 5)
    assert known.exit_code == 0 and "with 2 lines behind it" in known.output and "cannot" not in known.output
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    assert checked(path).exit_code == 0 and checked(path, "--last", hashes[2], "--lines", 3).exit_code == 0
    for option, value, said in (
        ("--last", hashes[4], "hash of --last"),
        ("--lines", 5, "at least 5 are expected"),
    ):
        cut = checked(path, option, value)
        assert cut.exit_code == 1 and said in cut.output and "missing at the end" in cut.output
    path.write_bytes(b"")
    assert checked(path, "--last", hashes[0]).exit_code == 1 and "0 lines" in checked(path).output
    odd = checked(path, "--last", "ABC")
    assert isinstance(odd.exception, ConfigError) and "--last: 'ABC' is no hash" in str(odd.exception)


@pytest.mark.parametrize("bytes_left", [1, 60, -1])
def test_a_torn_last_line_is_told(tmp_path, bytes_left):
    """Also where the line feed alone is missing: what an append writes is whole or not there."""
    path = tmp_path / "log"
    written(path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + lines[2][:bytes_left])
    torn = checked(path)
    second = json.loads(lines[1])["hash"]
    assert torn.exit_code == 1 and "line 3 is cut off: its end is missing" in torn.output
    assert f"2 lines before it hold, up to {second}" in torn.output


def test_long_lines_follow_each_other(tmp_path):
    """Of another process, so that the end of the file has to be read; none is longer than a line may be."""
    path = tmp_path / "log"
    one, other = AuditFile(str(path)), AuditFile(str(path))
    for size in (10, 5_000, 200_000, 900_000, 3):
        one.append({"text": "x" * size})
        other.append({"text": "y" * size})
    assert check_chain([path]).broken is None
    one.close()
    other.close()


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="audit-log"):
        AuditLog(str(tmp_path / "no" / "log"))
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(ConfigError, match="regular file"):
            AuditLog(str(odd))
