"""The life of one node process: join the controller, build what it is assigned, serve until told to stop.

The two roles are in `attention` and `expert`; this file knows joining, heartbeats and exits. It
starts no process and knows none of its siblings.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FrameType

from afserve import __version__
from afserve.comm.binding import Binding, bind
from afserve.config import AUTO, FULL, SAMPLES
from afserve.control.node.beginning import noting
from afserve.control.node.heartbeat import HeartbeatThread, Stats, heartbeat_seconds
from afserve.control.node.stream import ControlStream
from afserve.control.wire.desired import Deployment
from afserve.control.wire.values import Assigned, Failed, Register
from afserve.engine.stats import AttentionStats, ExpertStats
from afserve.errors import AfserveError, ConfigError
from afserve.kernels.isa import check_isa
from afserve.logs import configure
from afserve.member import Role
from afserve.tls import check_exposed, opened

log = logging.getLogger("afserve.node")
JOIN_SECONDS = 30.0
_EMPTY: dict[Role, Stats] = {
    Role.ATTENTION: AttentionStats(),
    Role.EXPERT: ExpertStats(),
}  # before the node says more
Serve = Callable[[ControlStream, Assigned, HeartbeatThread], None]


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Where to join and as what, with the run's token. `index` None takes any free place of the role.

    `verify` "full" overrules the run.

    `certs` is a folder of certificates, empty for none. Without one nothing leaves this host unless `insecure`. `isa`:
    what its kernels use where the run leaves it open. `binding`: where it is to compute and to have its memory.
    """

    role: str
    join: str
    token: str
    index: int | None = None
    verify: str = SAMPLES
    certs: str = ""
    insecure: bool = False
    isa: str = AUTO
    binding: Binding | None = None

    def __post_init__(self) -> None:
        if self.role not in tuple(Role):
            raise ConfigError(f"--role: {self.role!r} is not one of {', '.join(Role)}", param="role")
        host, _, port = self.join.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"--join: {self.join!r} is not HOST:PORT", param="join")
        if self.isa != AUTO and self.role == Role.GATEWAY:
            raise ConfigError("--isa: a gateway computes nothing; leave it out", param="isa")


def run_node(settings: NodeSettings, roles: Mapping[Role, Serve] | None = None) -> None:
    """Serve until the controller says stop. Raises what made the node unable to; the controller was told."""
    signal.signal(signal.SIGTERM, _leave)
    if settings.binding is not None and (refused := bind(settings.binding)):  # before any thread begins
        log.warning("not bound: %s", refused)
    certificates = opened(settings.certs)
    if not settings.insecure:
        check_exposed("--join", settings.join.rpartition(":")[0], certificates, insecure=False)
    check_isa(settings.isa)
    roles = roles or default_roles()  # a cold import takes long, and who has joined must not be silent
    with ControlStream(settings.join, settings.token, certificates) as stream:
        stream.send(Register(settings.role, settings.index, os.getpid(), socket.gethostname(), __version__))
        assigned = stream.expect(Assigned, JOIN_SECONDS, "an assignment")
        assert isinstance(assigned, Assigned)
        assigned = replace(assigned, deployment=_here(settings, assigned.deployment))
        if assigned.node.role is not Role.GATEWAY:  # a gateway has settings of its own
            configure(assigned.deployment.log_level, assigned.deployment.log_format)
        _serve(stream, assigned, roles[assigned.node.role])


def _here(settings: NodeSettings, deployment: Deployment) -> Deployment:
    """The run as this node was told to take part in it. Raises ConfigError where the run says otherwise."""
    if settings.verify == FULL:
        deployment = replace(deployment, verify=FULL)
    if settings.isa in (AUTO, deployment.engine.isa):
        return deployment
    if deployment.engine.isa != AUTO:
        raise ConfigError(
            f"--isa: {settings.isa}, but the run computes with {deployment.engine.isa} on all nodes; leave it out here",
            param="isa",
        )
    return replace(deployment, engine=replace(deployment.engine, isa=settings.isa))


def _serve(stream: ControlStream, assigned: Assigned, serve: Serve) -> None:
    deployment = assigned.deployment
    seconds = heartbeat_seconds(deployment.silence, len(deployment.nodes))
    heartbeat = HeartbeatThread(stream, _EMPTY.get(assigned.node.role), seconds)
    heartbeat.start()
    try:
        with noting(stream.send):
            serve(stream, assigned, heartbeat)
    except AfserveError as error:
        stream.send(Failed(error))
        raise
    finally:
        heartbeat.stop()


def default_roles() -> Mapping[Role, Serve]:
    from afserve.control.node.attention_process import serve_attention
    from afserve.control.node.expert import serve_expert

    return {Role.ATTENTION: serve_attention, Role.EXPERT: serve_expert}


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
