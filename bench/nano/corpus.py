"""The text nano learns: the running interpreter's standard library and dialogues made from its docstrings.

Knows no tokenizer and no tensor. The split is by a hash of each file's relative path, so it never
depends on the order of a directory listing.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SKIP = {"site-packages", "dist-packages", "__pycache__"}
HELD_OUT_PER_MILLE = 50
LARGEST = 600_000
EXPLAIN = "What does "


@dataclass(frozen=True, slots=True)
class Document:
    """One source file, by its path below the library folder."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer."""

    user: str
    assistant: str


def documents(folder: Path | None = None) -> list[Document]:
    """Every UTF-8 `.py` file of the standard library, tests included, sorted by path."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        if SKIP.intersection(path.relative_to(root).parts) or path.stat().st_size > LARGEST:
            continue
        text = _read(path)
        if text:
            found.append(Document(path.relative_to(root).as_posix(), text))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return ""


def fingerprint(docs: list[Document]) -> str:
    """A hash of every path and text: two machines with the same one train on the same bytes."""
    digest = hashlib.sha256()
    for doc in docs:
        digest.update(doc.path.encode() + b"\0" + doc.text.encode() + b"\0")
    return digest.hexdigest()[:16]


def turns(doc: Document) -> Iterator[Turn]:
    """Questions about a file's public functions and classes, with answers from its own text."""
    if any("test" in part or part.startswith("_") for part in doc.path.split("/")):
        return
    try:
        tree = ast.parse(doc.text)
    except (SyntaxError, ValueError):
        return
    module = doc.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    yield from _explain(tree, module)
    for node, name in _named(tree, module):
        yield from _explain(node, name)
        if isinstance(node, ast.FunctionDef):
            yield from _write(node, name)


def _named(tree: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef | ast.ClassDef, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            name = f"{prefix}.{node.name}"
            yield node, name
            if isinstance(node, ast.ClassDef):
                yield from _named(node, name)


def _explain(node: ast.FunctionDef | ast.ClassDef | ast.Module, name: str) -> Iterator[Turn]:
    paragraph = _first_paragraph(node)
    if paragraph:
        yield Turn(f"{EXPLAIN}{name} do?", paragraph)


def explains(turn: Turn) -> bool:
    """Whether it asks what something is for, as `facts` do with other names and shorter answers."""
    return turn.user.startswith(EXPLAIN)


def _write(node: ast.FunctionDef, name: str) -> Iterator[Turn]:
    signature = f"def {node.name}({ast.unparse(node.args)})"
    paragraph = _first_paragraph(node)
    if paragraph and len(signature) < 200:
        yield Turn(f"Write the signature of {name}.", signature)
    source = ast.unparse(node)
    if paragraph and len(source) < 1200:
        yield Turn(f"Write a Python function {node.name}: {paragraph}", f"```python\n{source}\n```")


def _first_paragraph(node: ast.FunctionDef | ast.ClassDef | ast.Module) -> str:
    text = ast.get_docstring(node) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph if 12 <= len(paragraph) <= 500 else ""
