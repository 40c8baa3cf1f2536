"""What an admin may do to a running deployment, each declared once: its name, its body as a checked value, its words.

The routes, /openapi.json and the answers of `afserve/server/endpoints/admin.py` follow `VERBS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from afserve.control.wire.change_values import (
    MOST_FAULT_SECONDS,
    Change,
    DrainOne,
    End,
    Fault,
    NewPhase,
    NewRole,
    Restart,
    ScaleTo,
)
from afserve.errors import RequestError
from afserve.server.bodies.fields import Fields, or_else, parse_object

_MOST_NODES = 4096
_NUMBER = 'a number of nodes, or a change of it as text: 3, "+1" or "-1"'


def scale_of(fields: Fields) -> ScaleTo:
    """{"attention": 3, "experts": "-1"}: a number is how many there shall be, text with a sign a change of it."""
    counts = {}
    for pool, value in fields.raw().items():
        if isinstance(value, bool) or not isinstance(value, int | str):
            fields.refuse(pool, _NUMBER)
        counts[pool] = str(value)
    if not counts:
        raise RequestError('the body names no pool; send such as {"attention": "+1", "experts": 4}')
    return ScaleTo(counts)


def drain_of(fields: Fields) -> DrainOne:
    """{"node": "expert-1"}"""
    node = fields.text("node")
    if node is None:
        raise RequestError("node: is missing; /status has the names of all nodes", param="node")
    return DrainOne(node)


def fault_of(fields: Fields) -> Fault:
    """{"node": "expert-1", "fault": "stop", "seconds": 2.5}"""
    node, fault = fields.text("node"), fields.text("fault")
    if node is None or fault is None:
        raise RequestError('say which node and how: {"node": "expert-1", "fault": "kill"}', param="node")
    return Fault(node, fault, or_else(fields.number("seconds", 0.0, MOST_FAULT_SECONDS), 0.0))


def role_of(fields: Fields) -> NewRole:
    """{"node": "expert-2", "role": "attention"}"""
    node, role = fields.text("node"), fields.text("role")
    if node is None or role is None:
        raise RequestError(
            'say which node and its new role: {"node": "expert-2", "role": "attention"}', param="node"
        )
    return NewRole(node, role)


def phase_of(fields: Fields) -> NewPhase:
    """{"node": "attention-2", "phase": "prefill"}"""
    node, phase = fields.text("node"), fields.text("phase")
    if node is None or phase is None:
        raise RequestError(
            'say which node and its new phase: {"node": "attention-2", "phase": "prefill"}', param="node"
        )
    return NewPhase(node, phase)


def end_of(fields: Fields) -> End:
    """{}"""
    for name in fields.raw():
        fields.refuse(name, "nothing: the body is {}")
    return End()


def restart_of(fields: Fields) -> Restart:
    """{"nodes": ["expert-1"]} or {"all": true}"""
    nodes, every = fields.texts("nodes", _MOST_NODES), fields.flag("all")
    if bool(nodes) == every:
        raise RequestError('nodes: say which, {"nodes": ["expert-1"]}, or {"all": true}', param="nodes")
    return Restart(nodes)


@dataclass(frozen=True, slots=True)
class Verb:
    """POST /admin/NAME with a body that `read` makes a change of; `takes` is its schema. One that is not `of_model` is
    for the whole run."""

    name: str
    read: Callable[[Fields], Change]
    summary: str
    takes: str = "Node"
    of_model: bool = True


VERBS = (
    Verb("scale", scale_of, "Other numbers of nodes.", "Scale"),
    Verb("drain", drain_of, "Let a node go."),
    Verb("restart", restart_of, "New processes for nodes."),
    Verb("role", role_of, "Another role for a node."),
    Verb("phase", phase_of, "Another phase for an attention node."),
    Verb("fault", fault_of, "Break a node on purpose."),
    Verb("down", end_of, "End the run.", "Any", of_model=False),
)
MOST_BYTES = 1 << 16
"""Of such a body: it is read on the event loop."""


def change_of(verb: Verb, body: bytes) -> Change:
    """Raises RequestError that names the field."""
    if len(body) > MOST_BYTES:
        raise RequestError(f"the body has {len(body)} bytes, /admin/{verb.name} takes {MOST_BYTES} at most")
    return verb.read(Fields(parse_object(body)))
