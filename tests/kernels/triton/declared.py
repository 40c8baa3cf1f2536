"""What a library's own source declares, read without importing it: packages of GPUs cannot be imported everywhere."""

import ast
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest


def expect_declared(double: Callable[..., object], package: str, file: str) -> None:
    """The library's function of the double's name takes what the double takes, in this order, and needs no more.
    Skips where the package is not installed."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    text = (Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8")
    found = [
        n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == double.__name__
    ]
    assert found, f"{package}/{file} has no {double.__name__}"
    names = [one.arg for one in found[0].args.args]
    needed = names[: len(names) - len(found[0].args.defaults)]
    taken = [p for p in inspect.signature(double).parameters.values() if p.name != "self"]
    assert [p.name for p in taken] == names[: len(taken)]
    assert [p.name for p in taken if p.default is p.empty] == needed
