"""`python -m bench.load_clients` with the one client that is always there, and the tables of its rows."""

import json

import pytest

from bench import load_clients, tables_serve

pytestmark = pytest.mark.process
SMALL = ["--only", "afserve bench serve", "--requests", "6", "--tokens", "8", "--prompt", "12"]


@pytest.fixture
def kept(monkeypatch, tmp_path, warm_benches):
    """Runs the bench; returns the rows that it has saved so far, which the tables are drawn from too."""
    out = tmp_path / "rows.jsonl"

    def run(*arguments):
        assert load_clients.main([*SMALL, *arguments, "--save", str(out)]) == 0
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        monkeypatch.setattr(tables_serve, "rows", lambda name: rows if name == "load_clients" else [])
        return rows

    return run


def test_beside_a_script(kept):
    (row,) = kept("--streams", "2", "--first", "0.1", "--gap", "0.01")
    assert row["exact"] and row["told"]["tokens"] == 48 and row["told"]["requests"] == 6
    assert min(row["errors"][key] for key in ("ttft", "e2e")) > -0.01, "nothing is read before it is sent"
    assert "| afserve bench serve | 0.1 s, 10 ms |" in tables_serve.clients()
    assert tables_serve.clients().endswith("| exact |")


def test_beside_one_another(kept):
    up = "--attention 1 --experts 1 --kv-tokens 8192"
    (row,) = kept("--served", "--turns", "2", "--up", up, "--streams", "16")
    assert row["exact"], "the server counted as many requests and tokens as its client"
    assert row["rate"] == pytest.approx(0.3 * row["capacity"], rel=0.01)
    assert row["beside"] == row["spread"] == {"ttft": 0, "gap": 0, "e2e": 0}
    assert 0 < row["told"]["ttft"] < row["told"]["e2e"]
    assert "at 30% of its capacity" in tables_serve.clients() and "met by all 3" in tables_serve.clients()


def test_a_time_too_short_for_the_clock_is_as_long_as_itself():
    assert load_clients._beside(0.0, 0.0) == 0 and load_clients._beside(3.0, 2.0) == 0.5
    assert load_clients._beside(1.0, 0.0) == pytest.approx(1 / load_clients.CLOCK_MS - 1)


def test_a_client_that_nobody_knows(capsys):
    assert load_clients.main(["--client", "wrk=wrk2"]) == 2
    assert "--client: wrk: none of afserve bench serve" in capsys.readouterr().err


def test_every_section_is_drawn_from_the_rows_that_are_kept():
    for section in tables_serve.SECTIONS.values():
        assert "\n| --- |" in section()
