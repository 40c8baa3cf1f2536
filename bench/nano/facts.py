"""What nano is to know by heart: functions of the standard library and the first sentence of each one's docstring.

Asks the running interpreter, so functions written in C are there too. Knows no tokenizer and no wording. No fact
comes from a file that is held out, and no answer stands in one. What another package has put in a function's place is
left out: torch replaces `inspect.getfile`.
"""

import importlib
import inspect
import json
import pkgutil
import re
import sys
import sysconfig
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from types import ModuleType

from bench.nano.corpus import Document

FILE = "facts.json"
LEFT_OUT = """
    __main__ antigravity asynchat asyncore audioop bdb cgi cgitb crypt curses distutils encodings
    ensurepip genericpath idlelib imaplib imp lib2to3 mailcap msilib msvcrt nis nntplib nt ntpath opcode
    ossaudiodev pdb pipes posix pty pyclbr pydoc pydoc_data pyexpat readline sndhdr spwd symtable
    telnetlib test this tkinter turtle turtledemo uu venv winreg winsound xdrlib
"""
SENTENCE = re.compile(r"(.+?[.!?])(?=\s+[A-Z(\"'`]|$)")
SIGNATURE = re.compile(r"->|\w\(.*\)|\.\.\.")
SHORTEST, LONGEST, NAME = 12, 110, 44


@dataclass(frozen=True, slots=True)
class Fact:
    """A function's dotted name and what it does."""

    name: str
    sentence: str


def known(documents: Collection[Document]) -> list[Fact]:
    """One fact for every documented public function or method whose first sentence is short, sorted by name.

    A function that has several names goes by the shortest; builtins have no prefix.
    """
    held = "\n".join(" ".join(doc.text.split()) for doc in documents if doc.held_out)
    named: dict[int, str] = {}
    said: dict[str, str] = {}
    for name, function in _functions():
        sentence = first_sentence(inspect.cleandoc(function.__doc__ or ""))
        if not sentence or len(name) > NAME or _is_held_out(function) or sentence in held:
            continue
        other = named.get(id(function))
        if other is None or (len(name), name) < (len(other), other):
            said.pop(other or "", None)
            named[id(function)], said[name] = name, sentence
    return [Fact(name, said[name]) for name in sorted(said)]


def shortest(facts: Collection[Fact], count: int) -> list[Fact]:
    """Those with the shortest names, which are the ones that people ask about, sorted by name."""
    return sorted(sorted(facts, key=lambda f: (len(f.name), f.name))[:count], key=lambda f: f.name)


def first_sentence(doc: str) -> str:
    """The sentence with its spaces made one; empty where it is a signature, too short, or longer than is learnt."""
    paragraph = " ".join(doc.split("\n\n")[0].split())
    found = SENTENCE.match(paragraph)
    sentence = found[1] if found else ""
    fits = SHORTEST <= len(sentence) <= LONGEST and sentence.isascii()
    return sentence if fits and not SIGNATURE.search(sentence) else ""


def _functions() -> Iterator[tuple[str, object]]:
    for name, module in _modules():
        short = "" if name == "builtins" else f"{name}."
        for key, value in sorted(vars(module).items()):
            if key.startswith("_") or not _belongs(value, module):
                continue
            if inspect.isroutine(value):
                yield short + key, value
            elif inspect.isclass(value) and value.__name__ == key:
                yield from ((f"{short}{key}.{k}", f) for k, f in _methods(value))


def _methods(kind: type) -> Iterator[tuple[str, object]]:
    for key, value in sorted(vars(kind).items()):
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if not key.startswith("_") and inspect.isroutine(function):
            yield key, function


def _belongs(value: object, module: ModuleType) -> bool:
    """Whether this module is where the name is documented, not where it is only imported."""
    home = getattr(value, "__module__", None) or module.__name__
    own = module.__name__
    return home in (own, f"_{own}", "builtins", "posix", "nt") or home.startswith(f"{own}.")


def _modules() -> Iterator[tuple[str, ModuleType]]:
    for name in sorted(sys.stdlib_module_names.difference(LEFT_OUT.split())):
        if name.startswith("_"):
            continue
        module = _imported(name)
        if module is None:
            continue
        yield name, module
        for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
            inner = None if info.name.startswith("_") else _imported(f"{name}.{info.name}")
            if inner is not None:
                yield f"{name}.{info.name}", inner
    yield "os.path", sys.modules["os.path"]


def _imported(name: str) -> ModuleType | None:
    """None where this platform lacks the module."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return importlib.import_module(name)
    except ImportError:
        return None


@cache
def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"]).resolve()


def _is_held_out(function: object) -> bool:
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    library = _library()
    if file is None or not Path(file).resolve().is_relative_to(library):
        return False
    return Document(Path(file).resolve().relative_to(library).as_posix(), "").held_out


def write(folder: Path, facts: Collection[Fact]) -> None:
    path = folder / FILE
    path.write_text(json.dumps({fact.name: fact.sentence for fact in facts}, indent=0) + "\n")


def read(folder: Path) -> list[Fact]:
    """The facts that the checkpoint in this folder was taught."""
    return [Fact(name, said) for name, said in json.loads((folder / FILE).read_text()).items()]


def drawn(facts: Collection[Fact], count: int, seed: int) -> list[Fact]:
    """At most `count` of them, each at most once; the same for the same seed."""
    return Random(seed).sample(list(facts), min(count, len(facts)))
