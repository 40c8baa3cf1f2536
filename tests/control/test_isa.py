"""One run, one instruction set: what a node is told, and what is said where nodes differ."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from afserve.clock import FakeClock
from afserve.control.chronicle import Chronicle
from afserve.control.membership.balancing import Balancing
from afserve.control.membership.members import Members
from afserve.control.node import worker
from afserve.control.node.worker import NodeSettings
from afserve.control.wire.values import Ready
from afserve.errors import ConfigError
from afserve.member import Role, attention_life, expert_life
from tests.control.test_controller import RUN


def settings(role: Role = Role.EXPERT, isa: str = "auto") -> NodeSettings:
    return NodeSettings(role, "127.0.0.1:1", "token", isa=isa)


def test_a_node_may_choose_where_the_run_leaves_it_open() -> None:
    asked = replace(RUN, engine=replace(RUN.engine, isa="avx2"))
    assert worker._here(settings(), asked) is asked
    assert worker._here(settings(isa="avx2"), asked) is asked
    assert worker._here(settings(isa="generic"), RUN).engine.isa == "generic"
    with pytest.raises(ConfigError, match="--isa: generic, but the run computes with avx2 on all nodes"):
        worker._here(settings(isa="generic"), asked)


def test_a_gateway_has_none_to_choose() -> None:
    with pytest.raises(ConfigError, match="--isa: a gateway computes nothing"):
        settings(Role.GATEWAY, "avx2")


def test_nodes_that_differ_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    first, second, gateway = attention_life(0, 0), expert_life(1, 0), attention_life(2, 0)
    members = [SimpleNamespace(id=first, node=first.node, isa="amx"), SimpleNamespace(id=gateway, isa="")]
    unused = cast(Balancing, None)
    chronicle = Chronicle(RUN, cast(Members, members), unused, FakeClock(), lambda *_: None, lambda _: None)
    with caplog.at_level(logging.WARNING, "afserve.control"):
        assert not chronicle.keep_said(second, Ready(1, isa="amx"))
        assert not chronicle.keep_said(gateway, Ready(1))
        assert not caplog.messages
        assert not chronicle.keep_said(second, Ready(1, isa="avx2"))
    (said,) = caplog.messages
    assert said.startswith("expert-1 computes with avx2, attention-0 with amx. Tokens have the same bits")
