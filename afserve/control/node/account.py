"""What a node can say of itself when it has to open its stream again: gathered from what it was told and has said.

The stream feeds it; the loops know nothing of it. A command counts from when it arrived, an answer from when it was
given, so whatever lies between is said as asked and not as done.
"""

from dataclasses import replace

from afserve.control.wire import placement_values, values
from afserve.member import MODEL_ROLES, Role
from afserve.placement.placement import Placement


class NodeAccount:
    """Not locked: its stream feeds and asks it under one lock."""

    def __init__(self) -> None:
        self._register: values.Register | None = None
        self._assigned: values.Assigned | None = None
        self._endpoint: values.Endpoint | None = None
        self._identity: values.Identity | None = None
        self._resident, self._isa = 0, ""
        self._loaded = self._serves = self._draining = self._drained = self._leaving = False
        self._held: dict[int, Placement] = {}
        self._asked: dict[int, Placement] = {}
        self._newest = 0

    @property
    def grace(self) -> float:
        """Seconds for which the node goes on without a controller: none before it has a place or once it must go."""
        assigned = self._assigned
        return 0.0 if assigned is None or self._leaving else assigned.deployment.engine.orphan_grace

    def said(self, value: values.FromNode) -> None:
        match value:
            case values.Register():
                self._register = value
            case values.Endpoint():
                self._endpoint = value
            case values.Identity(things):
                before = {} if self._identity is None else self._identity.things
                self._identity = values.Identity({**before, **things})
            case values.Ready(resident, isa=isa):
                self._loaded, self._resident, self._isa = True, resident, isa
            case placement_values.Filled(epoch):
                if (placement := self._asked.pop(epoch, None)) is not None:
                    self._held[epoch] = placement
            case placement_values.Unfilled(epoch):
                self._asked.pop(epoch, None)
            case placement_values.Adopted(epoch):
                if (placement := self._asked.pop(epoch, None)) is not None:
                    self._held = {epoch: placement}
            case values.Drained():
                self._drained = True

    def told(self, value: values.ToNode) -> None:
        match value:
            case values.Assigned():
                self._assigned = value
                if value.node.role in MODEL_ROLES:
                    self._held = {value.deployment.placement.epoch: value.deployment.placement}
                    self._newest = value.deployment.placement.epoch
            case placement_values.FillSlots(placement) | placement_values.Adopt(placement):
                self._asked[placement.epoch] = placement
                self._newest = max(self._newest, placement.epoch)
            case placement_values.Retire(epoch):
                self._held.pop(epoch, None)
                self._asked.pop(epoch, None)
            case values.Gateways():
                self._serves = True
            case values.Drain():
                self._draining = True
            case values.Shutdown():
                self._leaving = True

    def register(self) -> values.Register:
        """What a new stream begins with."""
        assert self._register is not None and self._assigned is not None, "it has a place"
        standing = values.Standing(
            self._assigned.life.generation,
            self._stage(),
            self._resident,
            self._endpoint,
            self._identity,
            tuple(self._held.values()),
            tuple(self._asked.values()),
            self._newest,
            self._isa,
        )
        return replace(self._register, index=self._assigned.node.index, standing=standing)

    def _stage(self) -> values.NodeStage:
        if self._drained:
            return values.NodeStage.DRAINED
        if self._draining:
            return values.NodeStage.DRAINING
        if not self._loaded:
            return values.NodeStage.LOADING
        assert self._assigned is not None
        serves = self._serves if self._assigned.node.role is Role.ATTENTION else False
        return values.NodeStage.SERVING if serves else values.NodeStage.LOADED
