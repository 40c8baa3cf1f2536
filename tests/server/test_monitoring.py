"""The dashboard and the alert rules ask for what /metrics says, by name and label, and for nothing else."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from afserve.engine.scheduling.request import TokenEvent
from afserve.engine.stats import HostStats, TierStats
from afserve.server.metrics.goodput import Times

FOLDER = Path(__file__).parents[2] / "configs" / "monitoring"
WORDS = {
    "sum", "max", "avg", "by", "le", "rate", "histogram_quantile", "and", "absent", "label_values", "model_name",
}  # fmt: skip


def dashboard():
    board = json.loads((FOLDER / "grafana.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return found + [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]


def alerts():
    rules = (FOLDER / "alerts.yml").read_text()
    return re.findall(r"^ +expr: (.*)$", rules, re.MULTILINE)


@pytest.fixture
def told(make_backend, run_server, nodes):
    """Sample name -> its label names, of nodes with tiers, a key and a class of service."""
    found: dict[str, set[str]] = {}
    tiers = TierStats(capacity=9, host=HostStats(capacity=9))
    attention = replace(nodes[0], stats=replace(nodes[0].stats, tiers=tiers))
    with run_server(make_backend(nodes=(attention, *nodes[1:]))) as server:
        metrics = server.app.state.service.models.first_model.metrics
        metrics.keys.count_first("a", 9, TokenEvent(1, (), cached_tokens=4))
        metrics.goodput.first(Times(1.0, service_class="chat"), 9, 0.1)
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=60)
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_query_is_answered(told):
    asked = [*dashboard(), *alerts()]
    assert len(asked) > 30
    for query in asked:
        bare = re.sub(r'"[^"]*"|\$\w+', "", query)
        names = set(re.findall(r"\bafserve_\w+", bare))
        assert names and names <= told.keys(), (query, names - told.keys())
        labels = set().union(*(told[name] for name in names))
        grouped = re.findall(r"by \(([\w, ]+)\)", bare)
        filtered = re.findall(r"[{,]\s*(\w+)\s*=~?", bare)
        for label in filtered + [one.strip() for group in grouped for one in group.split(",")]:
            assert label in labels, (query, label)
        unknown = set(re.findall(r"\b[a-z]\w*", bare)) - names - labels - WORDS - {"m", "h", "s"}
        assert not unknown, (query, unknown)


def test_each_alert_says_what_to_do():
    rules = (FOLDER / "alerts.yml").read_text()
    count = rules.count("- alert:")
    assert count == rules.count("summary:") == rules.count("description:") == len(alerts())
    board = json.loads((FOLDER / "grafana.json").read_text())
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]}
    assert len(places) == len(board["panels"]) == len({p["title"] for p in board["panels"]})


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_promtool_takes_them():
    for words in (["check", "rules", "alerts.yml"], ["check", "config", "--syntax-only", "prometheus.yml"]):
        done = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
