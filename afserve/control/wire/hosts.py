"""What the controller and a host that carries nodes say to each other, as frozen values, and as JSON bytes and back.

A few small messages per start of a node. Bytes that no correct peer sends raise ProtocolError before anything of them
is used.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from afserve.control.wire.values import PROTOCOL
from afserve.errors import ProtocolError
from afserve.member import NodeId, Role

HOSTS = "afserve.control.Hosts"
CARRY = "Carry"
CARRY_METHOD = f"/{HOSTS}/{CARRY}"
_MOST_BYTES = 1 << 20


# ---- host to controller


@dataclass(frozen=True, slots=True)
class Attach:
    """The first message: which host this is. `called` is what the cluster file calls it, empty to go by `addresses`.

    `running` are the names of the nodes that it carries already, from before its stream broke.
    """

    host: str
    addresses: tuple[str, ...]
    called: str
    version: str
    protocol: int = PROTOCOL
    running: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeExited:
    role: str
    index: int
    reason: str

    @property
    def node(self) -> NodeId:
        return NodeId(Role(self.role), self.index)


@dataclass(frozen=True, slots=True)
class HostFailed:
    """This host cannot carry nodes of this run; `field` is what differs from the controller's host."""

    field: str
    why: str


# ---- controller to host


@dataclass(frozen=True, slots=True)
class Welcome:
    """What this host is in the cluster file, the nodes it is to carry, and the model, which must be the same there.

    `grace` is how many seconds it goes on without a controller. Each node takes so many bytes, `takes`, of one of the
    `devices`, cpu or cuda:N, as it was planned.
    """

    called: str
    nodes: tuple[str, ...]
    model: str
    fingerprint: str
    grace: float
    devices: tuple[str, ...] = ()
    takes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StartNode:
    """Give this node a process; what is left of an earlier one is ended."""

    role: str
    index: int

    @property
    def node(self) -> NodeId:
        return NodeId(Role(self.role), self.index)


@dataclass(frozen=True, slots=True)
class EndHost:
    """The run is over. `why` is empty where it ends by wish."""

    why: str = ""


FromHost = Attach | NodeExited | HostFailed
ToHost = Welcome | StartNode | EndHost
_FROM_HOST: Mapping[str, type] = {kind.__name__: kind for kind in (Attach, NodeExited, HostFailed)}
_TO_HOST: Mapping[str, type] = {kind.__name__: kind for kind in (Welcome, StartNode, EndHost)}


def encode_host(value: FromHost | ToHost) -> bytes:
    return json.dumps({"kind": type(value).__name__, **asdict(value)}).encode()


def decode_from_host(data: bytes) -> FromHost:
    found: FromHost = _decode(data, _FROM_HOST)
    return found


def decode_to_host(data: bytes) -> ToHost:
    found: ToHost = _decode(data, _TO_HOST)
    return found


def _decode(data: bytes, kinds: Mapping[str, type]) -> Any:
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES}")
        said = json.loads(data)
        kind = kinds[said.pop("kind")]
        wanted = {field.name: field.type for field in fields(kind)}
        if said.keys() != wanted.keys():
            raise ValueError(f"its fields are {', '.join(sorted(said))}")
        value = kind(**{name: _checked(name, said[name], str(wanted[name])) for name in wanted})
        if isinstance(value, NodeExited | StartNode):
            _check_node(value)
        if isinstance(value, Welcome) and not len(value.nodes) == len(value.devices) == len(value.takes):
            raise ValueError("not each node has a device and a size")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(
            f"{len(data)} bytes are no message of a host: {error}; are versions mixed?"
        ) from error
    return value


def _checked(name: str, item: object, kind: str) -> object:
    """JSON has no tuples, and knows no difference between 1 and 1.0."""
    if "tuple" in kind:
        of = str if "str" in kind else int
        if isinstance(item, list) and all(type(one) is of for one in item):
            return tuple(item)
    elif "float" in kind and isinstance(item, int | float) and not isinstance(item, bool):
        return float(item)
    elif ("str" in kind and isinstance(item, str)) or ("int" in kind and type(item) is int):
        return item
    raise ValueError(f"{name} is {type(item).__name__}")


def _check_node(value: NodeExited | StartNode) -> None:
    if Role(value.role) is Role.GATEWAY or value.index < 0:
        raise ValueError(f"{value.role} {value.index} is no node of a cluster file")
