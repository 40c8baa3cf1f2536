"""Changes of a running deployment and their answers as JSON bytes and back: a gateway's question, not a message."""

import json
from dataclasses import asdict
from typing import Any

from afserve.control.wire.change_values import (
    Change,
    Changed,
    DrainOne,
    End,
    Fault,
    NewPhase,
    NewRole,
    Restart,
    ScaleTo,
)
from afserve.errors import ProtocolError

_KINDS: dict[str, type[Change]] = {
    kind.__name__: kind for kind in (ScaleTo, DrainOne, Restart, NewRole, NewPhase, Fault, End)
}


def encode_change(change: Change) -> bytes:
    return json.dumps({"kind": type(change).__name__, **asdict(change)}).encode()


def decode_change(data: bytes) -> Change:
    """Raises ProtocolError for bytes that are none."""
    fields = _object(data)
    kind = _KINDS.get(str(fields.pop("kind", "")))
    try:
        if kind is Restart:
            return Restart(tuple(fields["nodes"]))
        if kind is not None:
            return kind(**fields)
    except (TypeError, KeyError) as error:
        raise ProtocolError(f"{len(data)} bytes are no change of the deployment: {error}") from error
    raise ProtocolError(
        f"{len(data)} bytes are a change that this afserve does not know; are versions mixed?"
    )


def encode_changed(changed: Changed) -> bytes:
    return json.dumps(asdict(changed)).encode()


def decode_changed(data: bytes) -> Changed:
    """Raises ProtocolError for bytes that are none."""
    fields = _object(data)
    try:
        names = (tuple(fields[name]) for name in ("coming", "going", "notes"))
        return Changed(fields["counts"], *names)
    except (TypeError, KeyError) as error:
        raise ProtocolError(f"{len(data)} bytes do not say what has changed: {error}") from error


def _object(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise ProtocolError(f"{len(data)} bytes are no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ProtocolError(f"{len(data)} bytes are no JSON object")
    return fields
