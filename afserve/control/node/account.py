"""What a node can say of itself when it has to open its stream again: gathered from what it was told and has said.

The stream feeds it; the loops know nothing of it. A command counts from when it arrived, an answer from when it was
given, so whatever lies between is said as asked and not as done.
"""

from dataclasses import replace

from afserve.control.wire.values import (
    Adopt,
    Adopted,
    Assigned,
    Drain,
    Drained,
    Endpoint,
    Filled,
    FillSlots,
    FromNode,
    Gateways,
    Identity,
    NodeStage,
    Ready,
    Register,
    Retire,
    Shutdown,
    Standing,
    ToNode,
    Unfilled,
)
from afserve.member import MODEL_ROLES, Role
from afserve.placement.placement import Placement


class Account:
    """Not locked: its stream feeds and asks it under one lock."""

    def __init__(self) -> None:
        self._register: Register | None = None
        self._assigned: Assigned | None = None
        self._endpoint: Endpoint | None = None
        self._identity: Identity | None = None
        self._resident = 0
        self._loaded = self._serves = self._draining = self._drained = self._leaving = False
        self._held: dict[int, Placement] = {}
        self._asked: dict[int, Placement] = {}
        self._newest = 0

    @property
    def grace(self) -> float:
        """Seconds for which the node goes on without a controller: none before it has a place or once it must go."""
        assigned = self._assigned
        return 0.0 if assigned is None or self._leaving else assigned.deployment.engine.orphan_grace

    def said(self, value: FromNode) -> None:
        match value:
            case Register():
                self._register = value
            case Endpoint():
                self._endpoint = value
            case Identity(things):
                before = {} if self._identity is None else self._identity.things
                self._identity = Identity({**before, **things})
            case Ready(resident):
                self._loaded, self._resident = True, resident
            case Filled(epoch):
                if (placement := self._asked.pop(epoch, None)) is not None:
                    self._held[epoch] = placement
            case Unfilled(epoch):
                self._asked.pop(epoch, None)
            case Adopted(epoch):
                if (placement := self._asked.pop(epoch, None)) is not None:
                    self._held = {epoch: placement}
            case Drained():
                self._drained = True

    def told(self, value: ToNode) -> None:
        match value:
            case Assigned():
                self._assigned = value
                if value.node.role in MODEL_ROLES:
                    self._held = {value.deployment.placement.epoch: value.deployment.placement}
                    self._newest = value.deployment.placement.epoch
            case FillSlots(placement) | Adopt(placement):
                self._asked[placement.epoch] = placement
                self._newest = max(self._newest, placement.epoch)
            case Retire(epoch):
                self._held.pop(epoch, None)
                self._asked.pop(epoch, None)
            case Gateways():
                self._serves = True
            case Drain():
                self._draining = True
            case Shutdown():
                self._leaving = True

    def register(self) -> Register:
        """What a new stream begins with."""
        assert self._register is not None and self._assigned is not None, "it has a place"
        standing = Standing(
            self._assigned.life.generation,
            self._stage(),
            self._resident,
            self._endpoint,
            self._identity,
            tuple(self._held.values()),
            tuple(self._asked.values()),
            self._newest,
        )
        return replace(self._register, index=self._assigned.node.index, standing=standing)

    def _stage(self) -> NodeStage:
        if self._drained:
            return NodeStage.DRAINED
        if self._draining:
            return NodeStage.DRAINING
        if not self._loaded:
            return NodeStage.LOADING
        assert self._assigned is not None
        serves = self._serves if self._assigned.node.role is Role.ATTENTION else False
        return NodeStage.SERVING if serves else NodeStage.LOADED
