"""A counter is declared once: a field of a frozen dataclass, with its help text and the name that /metrics gives it.

A group is such a dataclass; it may hold others. From it follow how a group travels (`control/wire/counts.py`), what
/status says of it and its families in /metrics (`server/metrics/nodes.py`). A new counter is a field here and the line
that counts it. Nothing here knows a node, a wire or HTTP.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar
from zlib import crc32

from afserve.metrics import Kind, Labels

Group = TypeVar("Group")
_DECLARED, _LABELS = "counter", "labels"


class Over(Enum):
    """What a sample in /metrics stands for."""

    NODE = "node"  # one node
    PHASE = "phase"  # the attention nodes of a phase
    MODEL = "model"  # all nodes; also by vllm's name


@dataclass(frozen=True, slots=True)
class Metric:
    """A family's name after `afserve_`, its help and kind. `over` is who is added up. Counters with one name are one
    family, told apart by `labels`. `where` names an attribute of the group: nodes are left out where it is zero."""

    name: str
    help: str
    kind: Kind = "counter"
    over: Over = Over.NODE
    labels: Labels = ()
    where: str = ""


@dataclass(frozen=True, slots=True)
class DeclaredCounter:
    """`path` leads to it from the outermost group: its name, after those of the groups around it."""

    path: tuple[str, ...]
    kind: type[int] | type[float]
    help: str
    metrics: tuple[Metric, ...]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def read(self, group: object) -> Any:
        return attrgetter(self.name)(group)

    def is_drawn(self, group: object, metric: Metric) -> bool:
        """Whether this node has what `metric` is about."""
        return not metric.where or bool(attrgetter(".".join((*self.path[:-1], metric.where)))(group))


def counter(
    default: float,
    help: str,
    metric: str = "",
    *,
    kind: Kind = "counter",
    over: Over = Over.NODE,
    labels: Labels = (),
    where: str = "",
    also: tuple[Metric, ...] = (),
) -> Any:
    """The field of a group: whole where `default` is 0, with a fraction where it is 0.0.

    Without a `metric` it is not in /metrics. The rest as in `Metric`; `also` are further families that show it.
    """
    own = (Metric(metric, help, kind, over, labels, where),) if metric else ()
    return field(default=default, metadata={_DECLARED: (help, (*own, *also))})


def group(default: object, **labels: str) -> Any:
    """The field of a group inside whose families have these labels before their own."""
    return field(default=default, metadata={_LABELS: tuple(labels.items())})


def counters_of(group: Any) -> tuple[DeclaredCounter, ...]:
    """In the order of the fields, those of a group inside at its place. Every field must be one or the other."""
    return _counters_of(group)


@cache
def _counters_of(group: Any) -> tuple[DeclaredCounter, ...]:
    return tuple(_found(group, (), ()))


def _found(group: type, path: tuple[str, ...], around: Labels) -> Iterator[DeclaredCounter]:
    for each in dataclasses.fields(group):
        here = (*path, each.name)
        if dataclasses.is_dataclass(each.default):
            yield from _found(type(each.default), here, (*around, *each.metadata.get(_LABELS, ())))
        else:
            help, metrics = each.metadata[_DECLARED]
            kind: Any = type(each.default)
            labelled = tuple(dataclasses.replace(one, labels=(*around, *one.labels)) for one in metrics)
            yield DeclaredCounter(here, kind, help, labelled)


def digest_of(group: Any) -> int:
    """32 bits that differ where names, kinds or order do."""
    return _digest_of(group)


@cache
def _digest_of(group: Any) -> int:
    return crc32(" ".join(f"{one.name}:{one.kind.__name__}" for one in counters_of(group)).encode())


def values_of(group: object) -> tuple[list[int], list[float]]:
    """Its whole numbers and those with a fraction, each in the order of `counters_of`."""
    kind: Any = type(group)
    return list(_reader(kind, int)(group)), list(_reader(kind, float)(group))


@cache
def _reader(group: Any, kind: type) -> Any:
    names = [one.name for one in counters_of(group) if one.kind is kind]
    return attrgetter(*names) if len(names) > 1 else lambda read: [attrgetter(name)(read) for name in names]


def group_of(kind: type[Group], whole: Iterable[int], real: Iterable[float]) -> Group:
    """The other way. Raises ValueError for other numbers of values than `kind` has."""
    sources = {int: iter(whole), float: iter(real)}
    try:
        built: Group = _built(kind, sources)
    except StopIteration:
        raise ValueError(f"fewer counters than {kind.__name__} has") from None
    if any(True for source in sources.values() for _ in source):
        raise ValueError(f"more counters than {kind.__name__} has")
    return built


def _built(kind: type, sources: dict[type, Iterator[Any]]) -> Any:
    values = []
    for each in _defaults(kind):
        source = sources.get(type(each))
        values.append(_built(type(each), sources) if source is None else next(source))
    return kind(*values)


@cache
def _defaults(kind: Any) -> tuple[Any, ...]:
    return tuple(each.default for each in dataclasses.fields(kind))
