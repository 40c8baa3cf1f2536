"""Changes of a running deployment and their answers as JSON bytes and back: a gateway's question, not a message."""

import json
from dataclasses import asdict, fields
from typing import Any

from afserve.control.wire.change_values import VERBS, Change, Changed
from afserve.errors import ProtocolError


def encode_change(change: Change) -> bytes:
    return json.dumps({"kind": type(change).__name__, **asdict(change)}).encode()


def decode_change(data: bytes) -> Change:
    """Raises ProtocolError for bytes that are none."""
    said = _object(data)
    kind: Any = next(
        (verb.change for verb in VERBS.values() if verb.change.__name__ == said.get("kind")), None
    )
    if kind is None:
        raise ProtocolError(
            f"{len(data)} bytes are a change that this afserve does not know; are versions mixed?"
        )
    names = {each.name for each in fields(kind)}
    if said.keys() != {"kind", *names}:
        raise ProtocolError(f"{len(data)} bytes are no {kind.__name__}, which has {', '.join(sorted(names))}")
    change: Change = kind(
        **{name: tuple(said[name]) if isinstance(said[name], list) else said[name] for name in names}
    )
    return change


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
