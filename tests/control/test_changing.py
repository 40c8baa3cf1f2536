"""What `scale` asks for by pool, where attention nodes have phases: a scripted controller over the real membership."""

import pytest

from afserve.control.changing import Changing
from afserve.control.controller import Controller
from afserve.control.membership.events import Left, Ticked
from afserve.control.membership.recovery import OnLoss
from afserve.control.wire.change_values import DrainOne, NewPhase, Restart, ScaleTo
from afserve.errors import CapacityError, ConfigError
from afserve.member import attention_node
from tests.control.test_scaling import phased, served


class ScriptedController(Controller):
    """One without nodes: what is asked for reaches the membership, and nobody else."""

    changeable = True

    def __init__(self, membership):
        self.membership = membership

    def obey(self, event):
        self.membership.on(event, 1.0)


def test_pools_of_phases_are_counted_apart():
    changing = Changing(ScriptedController(phased()))
    changed = changing.change(ScaleTo({"prefill": "+1", "decode": "1"}))
    assert changed.counts == {"attention": 0, "experts": 1, "gateways": 0, "prefill": 2, "decode": 1}
    assert (changed.coming, changed.going) == (("attention-3",), ("attention-2",))
    changed = changing.change(ScaleTo({"attention": "+1"}))
    assert changed.counts["attention"] == 1, "of a run with phases, those that do both"


def test_a_run_gets_phases_while_it_serves():
    membership, _ = served(attention=2, most_attention=3)
    changing = Changing(ScriptedController(membership))
    with pytest.raises(ConfigError, match="no decode node"):
        changing.change(NewPhase("attention-0", "prefill"))
    changing.change(NewPhase("attention-1", "decode"))
    changed = changing.change(NewPhase("attention-0", "prefill"))
    assert (changed.counts["attention"], changed.counts["prefill"], changed.counts["decode"]) == (0, 1, 1)
    with pytest.raises(ConfigError, match="'prefil' is not one of"):
        changing.change(ScaleTo({"prefil": "1"}))
    with pytest.raises(ConfigError, match="'sleep' is not one of both, prefill, decode"):
        changing.change(NewPhase("attention-0", "sleep"))
    with pytest.raises(ConfigError, match="no decode node"):
        changing.change(DrainOne("attention-1"))


@pytest.mark.parametrize(
    "change", [ScaleTo({"attention": "1"}), Restart(("attention-0",)), Restart(), ScaleTo({"experts": "+1"})]
)
def test_changes_are_taken_while_no_attention_node_serves(change):
    membership, members = served(attention=1, experts=2, on_loss=OnLoss.RECOVER, patience=1e6, restarts=0)
    membership.on(Left(members[attention_node(0)], "killed"), 100.0)
    membership.on(Ticked(), 200.0)
    assert membership.attention_nodes().refusing
    assert Changing(ScriptedController(membership)).change(change).counts["attention"] == 1


def test_a_run_that_stops_is_not_changed():
    membership, _ = served()
    controller = ScriptedController(membership)
    controller.changeable = False
    with pytest.raises(CapacityError, match="the run is stopping"):
        Changing(controller).change(Restart())
