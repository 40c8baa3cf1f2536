"""docs/add-a-transport.md, followed: with one file and one row a new transport passes the battery and serves."""

import importlib.util
import re
import tempfile
from pathlib import Path

import pytest

from afserve.comm.transport import Transport
from afserve.comm.transports import connect
from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.errors import ConfigError, RendezvousError
from tests.comm.conformance import BATTERY, LAYOUT
from tests.comm.test_conformance import opener
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster

PAGE = Path(__file__).parents[2] / "docs/add-a-transport.md"
MOST_LINES = 110


@pytest.fixture
def mapped(tmp_path, monkeypatch):
    """Lines of code that the page needs, once its file is loaded and its row is in the table."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    page = PAGE.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (name,) = re.findall(r'^    "(\w+)": Opening\(\1\.listen, \1\.connect\),$', page, re.MULTILINE)
    path = tmp_path / f"{name}.py"
    path.write_text(code)
    found = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    monkeypatch.setitem(connect.TRANSPORTS, name, connect.Opening(module.listen, module.connect))
    yield sum(1 for line in code.splitlines() if line.strip()) + 1
    assert not [left for left in tmp_path.iterdir() if left.name.startswith("afserve-")]


@pytest.mark.parametrize("check", BATTERY, ids=lambda check: check.__name__)
def test_the_battery(mapped, check):
    check(opener("mapped"))


def test_the_page_counts_the_checks(mapped):
    assert len(BATTERY) == 11 and "a list of eleven checks" in PAGE.read_text()


def test_the_page_names_every_method():
    (rows,) = re.findall(r"\| method \| does \|\n(.*?)\n\n", PAGE.read_text(), re.DOTALL)
    named = set(re.findall(r"`(\w+)`", "\n".join(row.split("|")[1] for row in rows.splitlines())))
    asked = {name for name in vars(Transport) if not name.startswith("_")} - {"layout", "device"}
    assert named == asked


@pytest.mark.slow
def test_one_file_and_one_row_serve_the_same_tokens(mapped, monkeypatch, tiny_checkpoint, capsys):
    """One attention node and two expert nodes over it, against the colocated engine."""
    assert mapped <= MOST_LINES
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    alone = collect(drive(colocated(source, config()), requests(prompts())))
    monkeypatch.setitem(connect.TRANSPORTS, "local", connect.TRANSPORTS["mapped"])
    cluster = LocalCluster.build(source, config(micro_batches=2), attention=1, experts=2)
    assert collect(cluster.run(requests(prompts()))) == alone
    cluster.close()
    with capsys.disabled():
        print(f"\na new transport: {mapped} lines, one file and one row")


def test_an_address_that_is_nobodys(mapped, tmp_path):
    with pytest.raises(RendezvousError, match=r"expert-0: 'mapped:.*' is no file of its own"):
        connect.connect([f"mapped:{tmp_path}/0-1"], attention=0, layout=LAYOUT, timeout=1.0)


def test_it_is_unknown_without_its_row():
    with pytest.raises(ConfigError, match="'mapped' is not one of local, shm, tcp"):
        connect.listen("mapped", expert=0, attention_nodes=1, layout=LAYOUT)
