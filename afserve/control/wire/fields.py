"""Values in generated protobuf fields and back, by the types that their dataclasses declare: what needs no rule of its
own for each message.

Dataclass fields and protobuf fields have the same names. Whatever does not fit raises, and `messages.py` says so.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from afserve import errors
from afserve.config import EngineConfig
from afserve.control.wire.placements import pack, unpack
from afserve.counters import digest_of, group_of, values_of
from afserve.engine.stats import KINDS, Stats
from afserve.errors import AfserveError
from afserve.member import Life, NodeId, Role
from afserve.placement.placement import Placement
from afserve.settings import build

Value = TypeVar("Value")
Proto = Any  # generated classes carry no types that mypy can follow
Put = Callable[[Any, Proto, str], None]
Take = Callable[[Any], Any]
Codec = tuple[str, Callable[[Any, Proto], None], Callable[[Proto], Any]]  # the envelope's field, in, out
_KINDS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, AfserveError)
}


@dataclass(frozen=True, slots=True)
class _Field:
    """How one of a value is put into a message under its name, and taken out of what stands there. `whole`: `take` is
    given the message itself. One that is `optional` is unset where it is None."""

    name: str
    put: Put
    take: Take
    optional: bool = False
    whole: bool = False


_known: dict[type, tuple[_Field, ...]] = {}


def put_fields(value: Any, proto: Proto, leave: Collection[str] = ()) -> None:
    """All but those that are to be left to the caller."""
    for each in _fields_of(type(value)):
        item = getattr(value, each.name)
        if item is not None and each.name not in leave:
            each.put(item, proto, each.name)


def take_fields(cls: type[Value], proto: Proto, **others: object) -> Value:
    """`others` are given by the caller."""
    return cls(*[others[one.name] if one.name in others else _taken(one, proto) for one in _fields_of(cls)])


def _taken(each: _Field, proto: Proto) -> Any:
    if each.whole:
        return each.take(proto)
    if each.optional and not proto.HasField(each.name):
        return None
    found = getattr(proto, each.name)
    return found if each.take is _as_it_is else each.take(found)


def codec(name: str, cls: type) -> Codec:
    """Of a value all of whose fields have a form here."""
    return name, put_fields, lambda proto: take_fields(cls, proto)


def _fields_of(cls: type) -> tuple[_Field, ...]:
    """Heartbeats of thousands of nodes ask for them."""
    if cls not in _known:
        hints, named = get_type_hints(cls, include_extras=True), fields(cls)
        _known[cls] = tuple(_field(each.name, hints[each.name]) for each in named)
    return _known[cls]


def _field(name: str, hint: Any) -> _Field:
    if get_origin(hint) is Annotated:  # a life of a node whose role the message implies
        _, role = get_args(hint)
        return _Field(name, _put_life, lambda proto: _take_life(proto, role), whole=True)
    optional = NoneType in get_args(hint)
    kinds = tuple(kind for kind in get_args(hint) if kind is not NoneType) if optional else (hint,)
    if kinds == get_args(Stats):
        return _Field(name, lambda item, proto, _: put_stats(item, proto), take_stats, optional, whole=True)
    put, take = _form(kinds[0])
    return _Field(name, put, take, optional)


def _put_life(life: Life, proto: Proto, _: str) -> None:
    proto.index, proto.generation = life.index, life.generation


def _take_life(proto: Proto, role: Role) -> Life:
    return Life(NodeId(role, proto.index), proto.generation)


def _form(kind: Any) -> tuple[Put, Take]:
    outer, inner = get_origin(kind), get_args(kind)
    if outer is tuple:
        return _form_of_many(inner[0])
    if outer is Mapping:
        key, value = map(_made, inner)
        return (
            lambda items, proto, name: getattr(proto, name).update(items),
            lambda found: {key(k): value(v) for k, v in sorted(found.items())},
        )
    if (form := _message(kind)) is not None:
        into, take = form
        return lambda item, proto, name: into(item, _present(getattr(proto, name))), take
    return lambda item, proto, name: setattr(proto, name, item), _made(kind)


def _form_of_many(kind: Any) -> tuple[Put, Take]:
    if kind is Placement:
        return (
            lambda items, proto, name: getattr(proto, name).extend(map(pack, items)),
            lambda found: tuple(map(unpack, found)),
        )
    if (form := _message(kind)) is None:
        return lambda items, proto, name: getattr(proto, name).extend(items), tuple
    into, take = form

    def put(items: Any, proto: Proto, name: str) -> None:
        for item in items:
            into(item, getattr(proto, name).add())

    return put, lambda found: tuple(map(take, found))


def _message(kind: Any) -> tuple[Callable[[Any, Proto], None], Take] | None:
    """Of a value that is a message of its own."""
    if kind is AfserveError:
        return put_error, take_error
    if kind is EngineConfig:
        return put_settings, lambda proto: take_settings(EngineConfig, proto)
    if is_dataclass(kind) and isinstance(kind, type):
        return put_fields, lambda proto: take_fields(kind, proto)
    return None


def _made(kind: Any) -> Take:
    return kind if isinstance(kind, type) and issubclass(kind, Enum) else _as_it_is


def _as_it_is(found: Any) -> Any:
    return found


def _present(proto: Proto) -> Proto:
    """One without fields that are set must still be there."""
    proto.SetInParent()
    return proto


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
