"""What the Markdown pages claim about the repository: links, options of commands, and numbers that rows have."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from afserve.cli.main import cli
from bench.tables import TARGETS, rendered

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
] or sorted(path for path in ROOT.rglob("*.md") if ".venv" not in path.parts)
TEMPLATES = {ROOT / "bench/nano/card.md"}  # its links are those of the card that is made of it
MOST_LINES = 160


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every afserve command in a block, with lines that go on joined and comments cut off."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```(?:sh)?\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in re.sub(r"\\\n", " ", block).splitlines():
                words = re.search(
                    r"(?:^|\s|bin/)afserve ((?:up|plan|place|simulate|bench|node|host|certs|keys|chat|complete)\b.*)",
                    line,
                )
                if words and not line.lstrip().startswith("error:"):
                    cut = re.split(r"\s#\s|\s+[>|&]", words[1].replace("...", ""))[0]
                    found.append((relative(page), shlex.split(cut.rstrip("` "))))
    return found


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_no_page_has_the_marks_of_a_merge(path: Path):
    """Code with them does not run; a page with them is only wrong."""
    assert not re.search(r"^(<{7} |={7}$|>{7} )", path.read_text(), re.MULTILINE)


def test_the_readme_is_a_map():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


@pytest.mark.slow
@pytest.mark.parametrize("path", TARGETS, ids=relative)
def test_numbers_are_those_of_the_rows(path: Path):
    assert path.read_text() == rendered(path, TARGETS[path]()), "run python -m bench.tables"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in TEMPLATES], ids=relative)
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{relative(page)}: {target}"


def test_commands_have_the_options_that_pages_give_them():
    context, seen = click.Context(cli), 0
    for page, words in commands():
        command, rest = cli.get_command(context, words[0]), words[1:]
        while isinstance(command, click.Group) and rest:
            command, rest = command.get_command(context, rest[0]), rest[1:]
        assert command is not None, f"{page}: {words}"
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        for word in rest:
            name = word.partition("=")[0]
            if re.fullmatch(r"--[a-z][a-z-]*", name):
                assert name in known, f"{page}: afserve {words[0]} has no {name}"
                seen += 1
    assert seen > 60


def test_the_reference_names_what_exists():
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    assert len(named) > 5
    for name in named:
        module, _, part = name.rpartition(".")
        whole = ROOT / (name.replace(".", "/") + ".py")
        source = ROOT / (module.replace(".", "/") + ".py")
        assert whole.exists() or re.search(rf"^class {part}\b", source.read_text(), re.MULTILINE), name


def test_the_walk_of_a_token_quotes_its_files():
    page = (ROOT / "docs/a-token-in-the-source.md").read_text()
    quoted = re.findall(r"^\[`(\S+)`\]\(\.\./\1\)\n\n> (.+)$", page, re.MULTILINE)
    assert len(quoted) > 12
    for path, line in quoted:
        assert (ast.get_docstring(ast.parse((ROOT / path).read_text())) or "").startswith(line), path
