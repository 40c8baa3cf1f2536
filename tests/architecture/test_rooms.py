"""The rooms and their one-way stairs, read from the source: who imports whom, and what must not be imported at all."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.house import circles, statements

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "ground",
    "kernels",
    "placement",
    "comm",
    "models",
    "engine",
    "control",
    "server",
    "launch",
    "doors",
    "cli",
)
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "os.system"}
NAMES_UNSAFE = re.compile("|".join(rf"\b{call}\b".replace(".", r"\b\W*\b") for call in UNSAFE_CALLS))
EVERYBODYS = re.compile(
    r"""setattr\(\s*"?(?:[\w.]+\.)?"""
    r"(?:asyncio|heapq|logging|os|random|select|shutil|signal|socket|subprocess|threading|time)"
    r"""(?:\s*,|\.\w+")"""
)


@functools.cache
def sources() -> list[Path]:
    folders = [ROOT / "afserve", *(ROOT / room for room in ("kernels", "comm", "placement"))]
    found = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    return sorted(p for p in found if not p.name.endswith(("_pb2.py", "_pb2_grpc.py")))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "afserve" else ("afserve", *parts))


def room_of(module: str) -> str:
    parts = module.split(".")
    if len(parts) == 1 or parts[1] in ("__init__", "__main__"):
        return "cli"
    return parts[1] if parts[1] in ROOMS else "ground"


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Those that the tests below look at, read once: calls of a file that names one of the unsafe ones."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    wanted = ast.Import | ast.ImportFrom | ast.Call | ast.ExceptHandler
    every = ast.walk(tree) if NAMES_UNSAFE.search(text) else statements(tree)
    return tuple(node for node in every if isinstance(node, wanted))


def imports(path: Path, package: str = "afserve") -> Iterator[tuple[int, str]]:
    """(line, module) of every import of `package`, also inside functions and TYPE_CHECKING blocks."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.split(".")[0] == package)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if is_file(full) else str(node.module)


@functools.cache
def is_file(module: str) -> bool:
    return (ROOT / (module.replace(".", "/") + ".py")).exists()


@pytest.mark.slow
def test_imports_go_downward_only() -> None:
    rank = {room: number for number, room in enumerate(ROOMS)}
    broken = []
    for path in sources():
        module = module_name(path)
        for line, target in imports(path):
            if target in ("afserve.__version__", "afserve"):
                continue
            if rank[room_of(target)] > rank[room_of(module)]:
                broken.append(f"{path.relative_to(ROOT)}:{line}: {room_of(module)} must not import {target}")
    assert not broken, "\n".join(broken)


@pytest.mark.slow
def test_no_import_cycles() -> None:
    edges = {(module_name(p), target) for p in sources() for _, target in imports(p)}
    assert not circles({(module, target) for module, target in edges if "afserve" not in (module, target)})


@pytest.mark.slow
def test_no_import_cycles_among_benches() -> None:
    files = {
        path: ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "bench").rglob("*.py")
    }
    edges = {(module, target) for path, module in files.items() for _, target in imports(path, "bench")}
    assert len(files) > 50 and len(edges) > 50
    assert not circles(edges)


@pytest.mark.slow
def test_placement_and_gateway_code_never_name_torch() -> None:
    for path in sources():
        if room_of(module_name(path)) in ("placement", "ground", "server", "cli"):
            for node in nodes(path):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                allowed = path.name in ("doctor.py", "bench.py") or "bench" in path.parts
                assert allowed or not any(n.split(".")[0] == "torch" for n in names), f"{path}:{node.lineno}"


@pytest.mark.slow
def test_one_file_calls_the_runtime_of_a_vendor() -> None:
    """Another vendor's is another file beside it (`kernels/devices/device.py`)."""
    for path in sources():
        if path.relative_to(ROOT).as_posix() != "kernels/devices/cuda.py":
            text = path.read_text(encoding="utf-8")
            named = [
                one for one in ("torch.cuda", "torch.version.hip", "torch.xpu", "torch.mps") if one in text
            ]
            assert not named, f"{path}: {named}"


@pytest.mark.slow
def test_nothing_unsafe() -> None:
    found = []
    for path in sources():
        for node in nodes(path):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path}:{node.lineno} import {n}" for n in names if n.split(".")[0] in UNSAFE_MODULES]
            if isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
                found.append(f"{path}:{node.lineno} {ast.unparse(node.func)}")
            if isinstance(node, ast.ExceptHandler) and all(isinstance(b, ast.Pass) for b in node.body):
                caught = "" if node.type is None else ast.unparse(node.type)
                if caught in ("", "Exception", "BaseException"):
                    found.append(f"{path}:{node.lineno} swallows {caught or 'everything'}")
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_one_file_imports_ray_and_only_text_and_numbers_go_in_and_out_of_its_actor() -> None:
    """Ray pickles what it carries. Of text and numbers that makes no code, and the actor's class goes by its name."""
    launch = ROOT / "afserve/launch/sites"
    users = [path for path in sources() if "ray" in {t.split(".")[0] for _, t in imports(path, "ray")}]
    assert users == [launch / "ray_helper.py"]
    helper, actor = (ast.parse((launch / name).read_text()) for name in ("ray_helper.py", "ray_actor.py"))
    remotes = [
        ast.unparse(call)
        for call in ast.walk(helper)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "ray.remote"
    ]
    assert remotes == ["ray.remote(NodeHost)"]
    assert not any(
        ast.unparse(call.func) in ("ray.put", "ray.get")
        for call in ast.walk(helper)
        if isinstance(call, ast.Call)
    )
    (host,) = (node for node in actor.body if isinstance(node, ast.ClassDef))
    plain = {"str", "int", "float", "bool", "None"}
    for method in host.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name != "_read":
            given = [
                ast.unparse(one.annotation) for one in method.args.args[1:] if one.annotation is not None
            ]
            assert len(given) == len(method.args.args) - 1, method.name
            assert {*given, ast.unparse(method.returns)} <= plain, method.name


def test_rooms_named_like_packages_have_no_init() -> None:
    for room in ("kernels", "comm", "placement"):
        assert not (ROOT / room / "__init__.py").exists()
    for room in ("kernels", "comm", "placement", "configs"):
        assert (ROOT / "afserve" / room).is_symlink()


@pytest.mark.slow
def test_these_start_without_torch() -> None:
    """One after another in one interpreter; the first that brings it is named."""
    modules = [
        "afserve", "afserve.spec", "afserve.doors.client", "afserve.cli.main", "afserve.families.table",
        "afserve.server.app", "afserve.control.frontend", "afserve.control.controller", "afserve.cli.plan.command",
        "afserve.cli.plan.place", "afserve.cli.plan.simulate",
    ]  # fmt: skip
    code = f"import importlib, sys\nfor name in {modules}:\n    importlib.import_module(name)\n"
    code += "    print(name)\n    if 'torch' in sys.modules: break\nelse: print('none has torch')"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.split("\n") == [*modules, "none has torch", ""]


@pytest.mark.slow
def test_the_python_client_api_starts_without_the_http_server() -> None:
    heavy = {"starlette", "uvicorn", "torch", "afserve.control.controller"}
    code = f"import sys, afserve.doors.llm; print(sorted({heavy!r} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_python_client_api_runs_without_an_http_client() -> None:
    """httpx brings rich, click and pygments along."""
    heavy = {"httpx", "rich", "starlette", "torch"}
    code = f"import sys, afserve.launch.run.offline; print(sorted({heavy!r} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_two_wings_of_placement_do_not_know_each_other() -> None:
    for path in sources():
        wing = module_name(path).split(".")[:3]
        for line, target in imports(path):
            for one, other in (("optimizer", "planner"), ("planner", "optimizer")):
                if wing == ["afserve", "placement", one]:
                    assert not target.startswith(f"afserve.placement.{other}"), f"{path}:{line}: {target}"


def test_no_test_replaces_what_other_threads_of_its_process_call() -> None:
    """`tests.patching.patch_library` replaces it for one module."""
    for found in (
        'setattr(os, "pread", x)',
        'setattr("a.b.asyncio.sleep", x)',
        "setattr(\n    a.time, 'x', 1)",
    ):
        assert EVERYBODYS.search(found), found
    assert not EVERYBODYS.search('setattr(aside, "time", x)') and not EVERYBODYS.search(
        'setattr("a.time", x)'
    )
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    found = {str(path.relative_to(ROOT)) for path, text in texts.items() if EVERYBODYS.search(text)}
    assert found == {"tests/architecture/test_rooms.py", "tests/patching.py"}
