"""Figures of the product's source: sizes, names that stand in many classes, folders that import each other.

`python -m bench.house` prints them as JSON, with `--compare COMMIT` those of another commit beside them.
`tests/architecture/test_house.py` holds them within its budgets.
"""

import argparse
import ast
import io
import itertools
import json
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("afserve", "kernels", "comm", "placement")
LONG_FILE = 350
Sources = Mapping[PurePosixPath, str]


@dataclass(frozen=True, slots=True)
class House:
    """`many_names` is the share of public method names that five classes or more define, in percent."""

    files: int
    lines: int
    longest_files: list[tuple[int, str]]
    longest_function: int
    largest_folders: list[tuple[int, str]]
    classes: int
    protocols: int
    lone_protocols: list[str]
    many_names: float
    common_names: list[tuple[int, str]]
    both_ways: list[tuple[str, str]]
    folder_cycles: list[list[str]]


def product_sources(root: Path = ROOT) -> dict[PurePosixPath, str]:
    """Every file of the product once, by its path below `root`; generated modules are left out."""
    found = {}
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            inner = path.relative_to(root)
            linked = any((root / parent).is_symlink() for parent in [inner, *inner.parents])
            if not linked and "_pb2" not in path.name:
                found[PurePosixPath(inner.as_posix())] = path.read_text(encoding="utf-8")
    return found


def committed_sources(commit: str) -> dict[PurePosixPath, str]:
    """The same of a commit of this repository."""
    packed = subprocess.run(
        ["git", "archive", commit, *ROOMS], cwd=ROOT, capture_output=True, check=True, timeout=60
    ).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None and path.suffix == ".py" and "_pb2" not in path.name:
                found[path] = file.read().decode()
    return found


def read_house(sources: Sources) -> House:
    trees = {path: ast.parse(text) for path, text in sources.items()}
    lines = {path: text.count("\n") for path, text in sources.items()}
    classes = [(path, node) for path, tree in trees.items() for node in classes_of(tree)]
    public = public_methods(classes)
    protocols = [node for _, node in classes if is_protocol(node)]
    folders: dict[str, int] = defaultdict(int)
    for path in sources:
        folders[str(path.parent)] += 1
    edges = folder_imports(trees)
    return House(
        files=len(sources),
        lines=sum(lines.values()),
        longest_files=sorted(((n, str(p)) for p, n in lines.items() if n > LONG_FILE), reverse=True),
        longest_function=max(spans(trees.values())),
        largest_folders=sorted(((n, f) for f, n in folders.items()), reverse=True)[:5],
        classes=len(classes),
        protocols=len(protocols),
        lone_protocols=sorted(lone(protocols, [node for _, node in classes])),
        many_names=round(100 * sum(len(users) >= 5 for users in public.values()) / len(public), 1),
        common_names=sorted(((len(users), name) for name, users in public.items()), reverse=True)[:10],
        both_ways=sorted({tuple_of(edge) for edge in edges if edge[::-1] in edges}),
        folder_cycles=circles(edges),
    )


def tuple_of(edge: tuple[str, str]) -> tuple[str, str]:
    return (min(edge), max(edge))


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """As ast.walk, in another order and without expressions, which are most of its time."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, block, ())


def classes_of(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in statements(tree) if isinstance(node, ast.ClassDef))


def spans(trees: Iterable[ast.Module]) -> Iterator[int]:
    for tree in trees:
        for node in statements(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (node.end_lineno or node.lineno) - node.lineno + 1


def methods_of(node: ast.ClassDef) -> set[str]:
    return {
        inner.name
        for inner in node.body
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and not inner.name.startswith("_")
    }


def attributes_of(node: ast.ClassDef) -> Iterator[str]:
    """Those that the class body or a method gives a value or a type."""
    for inner in statements(ast.Module([node], [])):
        given = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
        for target in itertools.chain.from_iterable(getattr(one, "elts", [one]) for one in given):
            if isinstance(target, ast.Name) and inner in node.body:
                yield target.id
            elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                yield target.attr


def public_methods(classes: list[tuple[PurePosixPath, ast.ClassDef]]) -> dict[str, set[tuple[str, str]]]:
    users: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for path, node in classes:
        for name in methods_of(node):
            users[name].add((str(path), node.name))
    return users


def is_protocol(node: ast.ClassDef) -> bool:
    """`asyncio.Protocol` and what inherits it are none."""
    return any(ast.unparse(base).split("[")[0] in ("Protocol", "typing.Protocol") for base in node.bases)


def lone(protocols: list[ast.ClassDef], classes: list[ast.ClassDef]) -> Iterator[str]:
    """Protocols whose methods at most one class of the product has: by names alone, and through its bases."""
    by_name = defaultdict(list)
    for node in classes:
        by_name[node.name].append(node)

    def whole(node: ast.ClassDef, seen: frozenset[str] = frozenset()) -> set[str]:
        names = methods_of(node) | set(attributes_of(node))
        for base in node.bases:
            name = ast.unparse(base).split("[")[0].rpartition(".")[2]
            if name not in seen and name != node.name and len(by_name[name]) == 1:
                names |= whole(by_name[name][0], seen | {node.name})
        return names

    kept = [(whole(node)) for node in classes if not is_protocol(node)]
    for node in protocols:
        needed = methods_of(node)
        if needed and sum(needed <= has for has in kept) <= 1:
            yield node.name


def folder_imports(trees: Mapping[PurePosixPath, ast.Module]) -> set[tuple[str, str]]:
    """(folder, folder that it imports), each as its path; a folder's parent is another folder."""
    modules = {dotted(path): path for path in trees}
    edges = set()
    for path, tree in trees.items():
        for node in statements(tree):
            for name in imported(node):
                target = modules.get(name)
                if target is not None and target.parent != path.parent:
                    edges.add((str(path.parent), str(target.parent)))
    return edges


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def dotted(path: PurePosixPath) -> str:
    parts = path.with_suffix("").parts
    whole = parts if parts[0] == "afserve" else ("afserve", *parts)
    return ".".join(whole[:-1] if whole[-1] == "__init__" else whole)


def circles(edges: set[tuple[str, str]]) -> list[list[str]]:
    """Groups of folders that reach each other by imports, two or more each (Tarjan's strongly connected parts)."""
    after: dict[str, set[str]] = defaultdict(set)
    for start, end in edges:
        after[start].add(end)
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(folder: str) -> None:
        number[folder] = low[folder] = len(number)
        stack.append(folder)
        for other in sorted(after[folder]):
            if other not in number:
                visit(other)
                low[folder] = min(low[folder], low[other])
            elif other in stack:
                low[folder] = min(low[folder], number[other])
        if low[folder] == number[folder]:
            at = stack.index(folder)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for folder in sorted(after):
        if folder not in number:
            visit(folder)
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.house", description=__doc__.splitlines()[0])
    parser.add_argument("--compare", metavar="COMMIT", help="a commit whose figures are printed beside these")
    args = parser.parse_args()
    said = {"now": asdict(read_house(product_sources()))}
    if args.compare:
        said[args.compare] = asdict(read_house(committed_sources(args.compare)))
    print(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
