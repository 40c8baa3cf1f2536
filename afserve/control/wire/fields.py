"""Flat values, settings and errors in generated protobuf fields: what needs no rule of its own for each message.

Dataclass fields and protobuf fields have the same names. Whatever does not fit raises, and `messages.py` says so.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from afserve import errors
from afserve.counters import digest_of, group_of, values_of
from afserve.engine.stats import KINDS, Stats
from afserve.errors import AfserveError
from afserve.settings import build

Value = TypeVar("Value")
Proto = Any  # generated classes carry no types that mypy can follow
_KINDS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, AfserveError)
}
_PLAIN = (bool, int, float, str, bytes)
Codec = tuple[str, Callable[[Any, Proto], None], Callable[[Proto], Any]]  # the envelope's field, in, out
_known: dict[type, tuple[tuple[str, bool], ...]] = {}


def _names(cls: type) -> tuple[tuple[str, bool], ...]:
    """Of its fields, and whether each may be None. Heartbeats of thousands of nodes ask for them."""
    if cls not in _known:
        _known[cls] = tuple((field.name, "None" in str(field.type)) for field in fields(cls))
    return _known[cls]


def put_flat(value: Any, proto: Proto) -> None:
    """Fields that are None stay unset, which is what `optional` in the proto stands for."""
    for name, _ in _names(type(value)):
        item = getattr(value, name)
        if isinstance(item, _PLAIN):
            setattr(proto, name, item)


def take_flat(cls: type[Value], proto: Proto, **others: object) -> Value:
    for name, optional in _names(cls):
        if name not in others:
            absent = optional and not proto.HasField(name)
            others[name] = None if absent else getattr(proto, name)
    return cls(**others)


def flat(name: str, cls: type) -> Codec:
    return name, put_flat, lambda proto: take_flat(cls, proto)


_SCALARS = {bool: "flag", int: "whole", float: "real", str: "text"}


def put_settings(group: Any, proto: Proto) -> None:
    for field in fields(group):
        item, scalar = getattr(group, field.name), proto.settings[field.name]
        if item is not None:
            setattr(scalar, _SCALARS[type(item)], item)


def take_settings(cls: type[Value], proto: Proto) -> Value:
    """Every field, and no other: a peer that knows more or fewer settings is not obeyed by halves."""
    values = {name: _take_scalar(scalar) for name, scalar in proto.settings.items()}
    missing = {field.name for field in fields(cls)} - values.keys()  # type: ignore[arg-type]
    if missing:
        raise ValueError(f"{', '.join(sorted(missing))}: missing")
    return build(cls, values)


def _take_scalar(proto: Proto) -> bool | int | float | str | None:
    which = proto.WhichOneof("value")
    value: bool | int | float | str | None = None if which is None else getattr(proto, which)
    return value


def put_stats(stats: Stats | None, proto: Proto) -> None:
    """Into a message that has a field for each kind, or none of them."""
    for name, kind in KINDS.items():
        if type(stats) is kind:
            put_counts(stats, getattr(proto, name))


def take_stats(proto: Proto) -> Stats | None:
    name = proto.WhichOneof("stats")
    return None if name is None else take_counts(KINDS[name], getattr(proto, name))


def put_counts(group: object, proto: Proto) -> None:
    """A group of counters, as `afserve.counters` has them declared."""
    proto.declared = digest_of(type(group))
    whole, real = values_of(group)
    proto.whole.extend(whole)
    proto.real.extend(real)


def take_counts(kind: type[Value], proto: Proto) -> Value:
    """Raises ValueError where the peer has other declarations."""
    if proto.declared != digest_of(kind):
        raise ValueError(f"{kind.__name__} are declared otherwise there; are versions mixed?")
    return group_of(kind, proto.whole, proto.real)


def put_error(error: AfserveError, proto: Proto) -> None:
    proto.kind, proto.message, proto.param = type(error).__name__, error.message, error.param or ""
    proto.retry_after = getattr(error, "retry_after", 0.0)


def take_error(proto: Proto) -> AfserveError:
    """A kind with arguments of its own (PeerLost) comes back as its nearest plain ancestor."""
    kind = _KINDS.get(proto.kind, AfserveError)
    if issubclass(kind, errors.OverloadedError):
        return kind(proto.message, retry_after=proto.retry_after)
    if issubclass(kind, errors.PeerLost):
        return errors.PeerError(proto.message)
    return kind(proto.message, param=proto.param or None)


def optional_error(proto: Proto) -> AfserveError | None:
    return take_error(proto.error) if proto.HasField("error") else None
