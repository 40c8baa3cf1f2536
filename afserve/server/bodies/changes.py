"""Bodies that change the running deployment, as checked values: numbers of nodes by pool, names of nodes."""

from afserve.control.wire.change_values import (
    MOST_FAULT_SECONDS,
    DrainOne,
    End,
    Fault,
    NewPhase,
    NewRole,
    Restart,
    ScaleTo,
)
from afserve.errors import RequestError
from afserve.server.bodies.fields import Fields, or_else

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
