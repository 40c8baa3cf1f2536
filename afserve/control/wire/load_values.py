"""What a gateway counts of the requests that it answers, as it says to the controller: sums since its beginning."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from afserve.counters import counter

Group = TypeVar("Group")


@dataclass(frozen=True, slots=True)
class LoadCounts:
    """First tokens and the rest of an answer are late where they missed the time that the request, or the server, asks
    for. Its own /metrics have the same by name."""

    came: int = counter(0, "Sequences that were asked for.")
    prompt_tokens: int = counter(0, "Tokens of their prompts.")
    found_tokens: int = counter(0, "Of these, in caches.")
    first: int = counter(0, "First tokens.")
    first_late: int = counter(0, "Of these, late.")
    ended: int = counter(0, "Sequences that ended.")
    answer_tokens: int = counter(0, "Their tokens.")
    rest_tokens: int = counter(0, "Of these, behind the first.")
    rest_late: int = counter(0, "Sequences whose further tokens were late.")
    first_seconds: float = counter(0.0, "Seconds to first tokens.")
    rest_seconds: float = counter(0.0, "Seconds from first tokens to last.")


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """Of one class of service. What has no time to keep to is not judged."""

    came: int = counter(0, "Sequences that were asked for.")
    first: int = counter(0, "First tokens that were judged.")
    first_late: int = counter(0, "Of these, late.")
    rest: int = counter(0, "Sequences whose further tokens were judged.")
    rest_late: int = counter(0, "Of these, late.")
    goodput_tokens: int = counter(0, "Tokens of those that were not.")


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """`classes` by the operator's names."""

    total: LoadCounts = LoadCounts()
    classes: Mapping[str, ClassCounts] = field(default_factory=dict)


def added(loads: Iterable[GatewayLoad]) -> GatewayLoad:
    """Of several gateways."""
    found = list(loads)
    names = sorted({name for one in found for name in one.classes})
    return GatewayLoad(
        _sum(LoadCounts, [one.total for one in found]),
        {
            name: _sum(ClassCounts, [each.classes[name] for each in found if name in each.classes])
            for name in names
        },
    )


def _sum(kind: type[Group], parts: Iterable[Any]) -> Group:
    counted: Any = kind
    return kind(*(sum(getattr(one, each.name) for one in parts) for each in fields(counted)))


def grown(new: ClassCounts, old: ClassCounts) -> ClassCounts:
    """From one moment to a later one."""
    return ClassCounts(*(getattr(new, each.name) - getattr(old, each.name) for each in fields(ClassCounts)))
