"""The pages of docs/ followed literally: their `sh` and `python` blocks in order, in one shell, with the real program.

Only what two runs at once would fight over is replaced: the port 8000 and the names of network namespaces.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ports import free_port
from tests.warm.interpreter import WARM

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 240.0
PREFIX = "afs-"  # of the page's namespaces a and b
# page: what has to stand in its output
PAGES = {
    "serve-a-checkpoint": ["+ bundled model", "ready in", "text_completion", "data: [DONE]", "expert-1", "length"],
    "serve-several-models": ['"id": "default"', '"model":"whole"', "attention-1 serves", 'model_name="small"'],
    "place-experts": ["most replicas", "moves lower the largest load by", '"moving"', "counts.afroute"],
    "plan-capacity": [
        "Do not disaggregate: ",
        "\nDisaggregate: ",
        "TTFT ms: p50",
        "wrote plan.json",
        "experts lost at",
    ],
    "read-the-traces": ["afserve_attention_node_busy_seconds", "attention-0  attend", "gateway      stream"],
    "change-a-running-deployment": ["attention-1 serves", "attention-0 has gone", "expert-0 serves"],
    "prefill-and-decode": ["attention-0 computed 56 of 56 blocks", "attention-2 serves", "afserve_prompts_handed_over"],
    "survive-losses": ["the same tokens", "expert-1 returned", "spare slots", "all nodes serve"],
    "ask-for-formats-and-tools": ['"finish_reason":"stop"', '"object":"response"'],
    "use-it-from-an-agent": ['"context_window"', "x-afserve-ignored: thinking", '"capabilities"'],
    "share-a-server": ["REQUESTS/MIN", "401", '"object":"embedding"', "invalid_api_key", '"key": "alice"'],
    "use-the-command-line": ["2 of 2 answered, 0 failed", "8 of 8", "generated tokens/s"],
    "several-sockets": ["+ NUMA           node 0: cores", "cores of 0 read memory of 0: "],
    "kubernetes": ["kustomization.yaml", "controller.yaml"],
    "drafts": ["accepted_prediction_tokens", "ngram drafts: ", "vllm:spec_decode_num_accepted", "the same answers"],
    "slurm": ["#SBATCH --no-kill", "--expert-copies 2"],
    "two-hosts": ["transport: tcp, between hosts, over TLS", "it carries expert-0, expert-1", "in plain text"],
}  # fmt: skip
# Plans of many pools; `architecture/test_pages.py` checks their options by day.
BY_NIGHT = {"plan-capacity", "drafts", "place-experts"}
ALONE = {"prefill-and-decode", "survive-losses"}  # their nodes are killed, or raced

NOT_RUN = {
    "a-token-in-the-source",
    "add-a-family",
    "add-a-transport",
    "serve-a-gguf-file",
    "architecture",
    "keep-kv-on-disk",
    "route-by-kv-events",
    "gpu-libraries",
    "larger-than-memory",
    "ray",
    "reference",
    "size-pools",
    "measure-a-server",
    "watch-the-live-page",
    "run-as-a-service",
}


def script_of(page: str) -> str:
    """All blocks that the page says are run; a `python` block is given to the interpreter."""
    lines = []
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        lines.append(block if language == "sh" else f"python - <<'PYTHON'\n{block}PYTHON\n")
    return "\n".join(lines)


def with_port(script: str, port: int) -> str:
    script = script.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace(
        "afserve up ", f"afserve up --port {port} "
    )
    return re.sub(
        r"afserve (complete|chat|status|scale|drain|restart|chaos)\b",
        rf"afserve \1 --url http://127.0.0.1:{port}",
        script,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A place to follow a page in: a checkout's configs, and `afserve` and `python` on the path."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "bin").mkdir()
    for name, words in (("afserve", WARM.command()), ("python", [sys.executable])):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        command.chmod(0o755)
    return tmp_path


@pytest.fixture
def prefix() -> Iterator[str]:
    """This run's own; the namespaces are gone at the end."""
    mine = f"afd{os.getpid() % 100000}"
    yield mine
    for side in "ab":
        subprocess.run(["ip", "netns", "del", mine + side], capture_output=True, check=False)


def follow(folder: Path, script: str) -> str:
    """What the blocks print, with the logs that they write. Nothing that they start is left."""
    environment = {
        **os.environ,
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
    }
    with open(folder / "printed", "w+") as printed:
        shell = subprocess.Popen(
            ["bash", "-eu", "-c", script],
            cwd=folder,
            env=environment,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
        try:
            code = shell.wait(DEADLINE)
        finally:
            left = alive(shell.pid)
            if left:
                os.killpg(shell.pid, signal.SIGKILL)
    said = "\n".join(path.read_text(errors="replace") for path in (folder / "printed", *folder.glob("*.log")))
    assert code == 0, said[-4000:]
    assert not left, f"{left} processes were left running"
    return said


def alive(group: int) -> int:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return 0
    return 1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.alone] * (name in ALONE) + [pytest.mark.long] * (name in BY_NIGHT)
        )
        for name in PAGES
    ],
)
def test_the_page_works_as_it_stands(name: str, folder: Path, prefix: str):
    script = script_of((ROOT / f"docs/{name}.md").read_text())
    if "ip netns" in script:
        if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("needs root and ip(8)")
        script = script.replace(PREFIX, prefix)
    if "afserve certs" in script:
        pytest.importorskip("cryptography", reason="certificates need afserve[tls]")
    said = follow(folder, with_port(script, free_port()))
    for wanted in PAGES[name]:
        assert wanted in said, f"{wanted!r} is not in:\n{said[-4000:]}"


def test_every_page_is_listed_and_run():
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    listed = set(re.findall(r"\]\(([\w-]+)\.md\)", (ROOT / "docs/README.md").read_text()))
    assert listed == pages == set(PAGES) | NOT_RUN


def test_the_site_has_every_page():
    """mkdocs' `nav` names each once, and nothing else."""
    yaml = pytest.importorskip("yaml")
    found: list[str] = []
    todo = list(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    while todo:
        entry = todo.pop()
        if isinstance(entry, str):
            found.append(entry)
        elif isinstance(entry, dict):
            todo += entry.values()
        else:
            todo += entry
    assert sorted(found) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
