"""`afserve run-batch` against a server on a socket: every line is answered once, full servers are asked again."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from afserve.cli.main import run
from afserve.cli.run_batch import run_batch
from afserve.doors import client_http

ODD = "\ud800 \u2028 \u0085"  # half a character, and ends of lines for some


@contextmanager
def answering(script):
    """`script(body)` gives a status, or None to close the connection without an answer."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, body, self.headers["authorization"]))
            status = script(body)
            if status is None:
                self.close_connection = True
                return
            data = json.dumps({"said": body["n"], "odd": ODD}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.send_header("x-request-id", "r-1")
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def batch(path, count, url="/v1/completions"):
    lines = [{"custom_id": f"c{n}", "method": "POST", "url": url, "body": {"n": n}} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def rows(path):
    return {row["custom_id"]: row for row in map(json.loads, path.read_text().splitlines())}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(client_http, "_LONGEST_PAUSE", 0.001)
    monkeypatch.setattr(client_http, "_MOST_ASKED", 0.001)


@pytest.mark.slow
def test_every_line_is_answered_once_however_full_the_server_was(tmp_path):
    once = set()

    def script(body):
        if body["n"] % 3 and body["n"] not in once:
            once.add(body["n"])
            return (429, 503, None)[body["n"] % 3]
        return 200

    (tmp_path / "key").write_text("k")
    flags = ["--concurrency", "4", "--json", "--api-key-file", str(tmp_path / "key")]
    with answering(script) as (url, asked):
        done = CliRunner().invoke(
            run_batch, [str(batch(tmp_path / "in", 30)), "-o", str(tmp_path / "out"), "--url", f"{url}/v1", *flags],
            catch_exceptions=False, standalone_mode=False,
        )  # fmt: skip
    assert done.return_value == 0
    assert json.loads(done.output) == {
        "output": str(tmp_path / "out"), "total": 30, "earlier": 0, "answered": 30, "failed": 0,
    }  # fmt: skip
    found = rows(tmp_path / "out")
    assert {name: row["response"]["body"]["said"] for name, row in found.items()} == {
        f"c{n}": n for n in range(30)
    }
    assert all(row["error"] is None and row["response"]["request_id"] == "r-1" for row in found.values())
    assert {path for path, _, _ in asked} == {"/v1/completions"} and {key for *_, key in asked} == {
        "Bearer k"
    }


def test_what_failed_is_asked_again_with_go_on(tmp_path, capsys):
    given, out = batch(tmp_path / "in", 6), tmp_path / "out"
    with answering(lambda body: 400 if body["n"] == 1 else None if body["n"] == 2 else 200) as (url, _):
        flags = ["run-batch", str(given), "-o", str(out), "--url", url, "--retries", "1"]
        assert run(flags) == 1
        assert "4 of 6 answered, 2 failed" in capsys.readouterr().out
        found = rows(out)
        assert found["c1"]["response"]["status_code"] == 400 and found["c2"]["error"]["code"] == "no_answer"
        assert run(flags) == 2 and "--go-on" in capsys.readouterr().err
    assert rows(out)["c0"]["response"]["body"]["odd"] == ODD
    out.write_text(out.read_text() + '{"custom_id": "c5", "resp')  # as a killed one leaves it
    with answering(lambda body: 200) as (url, asked):
        assert run([*flags[:4], "--url", url, "--go-on"]) == 0
    assert sorted(body["n"] for _, body, _ in asked) == [1, 2] and "4 were there" in capsys.readouterr().out
    assert (
        all(row["response"]["status_code"] == 200 for row in rows(out).values())
        and out.read_text().count("\n") == 6
    )


@pytest.mark.parametrize(
    ("there", "ours"), [("# my notes", False), ('{"id": "batch_req_1", "cust', True), ('{"id"', True)]
)
def test_go_on_takes_only_an_output_of_a_batch(tmp_path, capsys, there, ours):
    given, out = batch(tmp_path / "in", 1), tmp_path / "out"
    out.write_text(there)
    with answering(lambda body: 200) as (url, _):
        code = run(["run-batch", str(given), "-o", str(out), "--url", url, "--go-on"])
    if ours:
        assert code == 0 and list(rows(out)) == ["c0"]
    else:
        assert (
            code == 2 and "not the answers of a batch" in capsys.readouterr().err and out.read_text() == there
        )


def test_only_a_newline_ends_a_line(tmp_path):
    given, out = tmp_path / "in", tmp_path / "out"
    body = {"prompt": "a\u2028b", "n": 0}
    line = {"custom_id": "c\u0085", "url": "/v1/completions", "body": body}
    given.write_text(json.dumps(line, ensure_ascii=False), encoding="utf-8")
    flags = ["run-batch", str(given), "-o", str(out), "--url"]
    with answering(lambda body: 200) as (url, asked):
        assert run([*flags, url]) == 0
    assert asked[0][1] == body
    row = json.loads(out.read_text())
    out.write_text(json.dumps(row, ensure_ascii=False).replace("\ud800", "") + "\n", encoding="utf-8")
    with answering(lambda body: 200) as (url, asked):
        assert run([*flags, url, "--go-on"]) == 0
    assert not asked


@pytest.mark.parametrize(
    ("line", "said"),
    [("x", "line 2: not JSON"), ("[]", "needs a custom_id"),
     ('{"custom_id": "c0", "url": "/v1/files", "body": {}}', "not one of"),
     ('{"custom_id": "c0", "url": "/v1/completions", "body": {}}', "'c0' is there twice"),
     ('{"custom_id": "d", "url": "/v1/completions", "body": {"stream": true}}', "no stream")],
)  # fmt: skip
def test_a_wrong_line_is_named_before_anything_is_asked(tmp_path, capsys, line, said):
    given = batch(tmp_path / "in", 1)
    given.write_text(given.read_text() + line)
    assert run(["run-batch", str(given), "-o", str(tmp_path / "out"), "--url", "http://127.0.0.1:9"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()
