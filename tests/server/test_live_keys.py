"""The page's part about keys, by node without a browser: which lines it draws, whatever keys are named."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from afserve.server.metrics.key_meter import MOST

NODE = shutil.which("node")
FOLDER = Path(__file__).resolve().parents[2] / "afserve/server/static/live"
CHART = """
export const shareChart = () => ({
  names: [], added: [],
  use(series) { this.names = series.map(one => one.label); },
  before(at, columns) { this.past = this.names.map(name => Object.hasOwn(columns, name) ? columns[name] : null); },
  add(at, values) { this.added.push(values); },
});
"""
PAGE = """
const box = { hidden: true, tBodies: [null] };
export const $ = () => box, color = () => "", fillRows = () => {}, percent = share => `${share}`;
"""


def drawn(tmp_path, past, frames):
    """The names of the chart's lines, what was before by line, and the values of each frame."""
    (tmp_path / "charts.js").write_text(CHART)
    (tmp_path / "page.js").write_text(PAGE)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    text = (FOLDER / "keys.js").read_text()
    (tmp_path / "keys.js").write_text(text.replace("const chart =", "export const chart ="))
    (tmp_path / "play.js").write_text(f"""
import {{ chart, drawKeys, rememberKeys }} from "./keys.js";
rememberKeys({json.dumps(past)});
const frames = {json.dumps(frames)}.map(key_hits => ({{ key_hits }}));
frames.forEach((frame, i) => drawKeys(frame, frames[i - 1] ?? frame, i, i));
console.log(JSON.stringify([chart.names, chart.past, chart.added]));
""")
    assert NODE is not None
    done = subprocess.run(
        [NODE, "play.js"], cwd=tmp_path, capture_output=True, check=False, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(NODE is None, reason="there is no node on this machine")
def test_lines_are_of_those_who_asked_the_most(tmp_path):
    """A key may be named as what every object of JavaScript has. One that comes back goes on from what it had."""
    hits = {"other keys": [900, 0], **{f"k{i}": [10 + i, 0] for i in range(8)}}
    past = {"at": [1], "keys": {f"k{i}": [i / 10] for i in range(8)}}
    second = {**hits, "constructor": [40, 10], "toString": [30, 30]}
    third = {name: counts for name, counts in second.items() if name != "constructor"}
    fourth = {**second, "constructor": [50, 15]}
    assert drawn(tmp_path, past, [hits])[:2] == [
        ["k7", "k6", "k5", "k4", "k3", "k2"], [[0.7], [0.6], [0.5], [0.4], [0.3], [0.2]],
    ]  # fmt: skip
    names, _, added = drawn(tmp_path, past, [hits, second, third, fourth])
    assert names == ["constructor", "toString", "k7", "k6", "k5", "k4"]
    assert [values[:2] for values in added] == [[0.25, 1], [None, None], [0.5, None]]


@pytest.mark.slow
@pytest.mark.skipif(NODE is None, reason="there is no node on this machine")
def test_a_key_that_may_have_been_shown_before_begins_with_what_it_asks_now(tmp_path):
    """Where all places are taken, its counts may be those of hours; where one is free, it is new."""
    assert f"const MOST = {MOST};" in (FOLDER / "keys.js").read_text()
    hits = {f"k{i}": [10, 5] for i in range(MOST)}
    full = {name: hits[name] for name in [*hits][1:]}
    frames = [hits, {**full, "back": [1000, 900]}, {**full, "back": [1100, 910]}]
    names, _, added = drawn(tmp_path, {"at": [], "keys": {}}, frames)
    assert names[0] == "back" and [values[0] for values in added] == [None, 0.1]
    names, _, added = drawn(tmp_path, {"at": [], "keys": {}}, [full, {**full, "new": [1000, 900]}])
    assert names[0] == "new" and added[0][0] == 0.9
