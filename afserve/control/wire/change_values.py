"""What people may ask of a running deployment, and what they are answered: values that clients, HTTP, gateways and the
controller share.

A change is declared here: its fields, and in VERBS its address and words. Route, body, schema, client and the message
to the controller follow from that; what it does is in `changing.py`. It is obeyed at once or refused; how far it has
come is seen in the list of members.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum, StrEnum
from typing import Any, get_origin

from afserve.errors import ConfigError, shown
from afserve.member import AttentionPhase, Role

PHASE_POOLS: Mapping[str, AttentionPhase] = {
    "prefill": AttentionPhase.PREFILL,
    "decode": AttentionPhase.DECODE,
}
POOLS: Mapping[str, Role] = {"attention": Role.ATTENTION, "experts": Role.EXPERT, "gateways": Role.GATEWAY}
MOST_FAULT_SECONDS = 3600.0
_LONGEST = 8  # characters of a number of nodes


@dataclass(frozen=True, slots=True)
class ScaleTo:
    """Other numbers of nodes, by pool: `3` is how many there shall be, `+1` and `-1` how many more or fewer."""

    counts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DrainOne:
    """This node takes nothing new, and goes once nothing needs it."""

    node: str


@dataclass(frozen=True, slots=True)
class Restart:
    """New processes for these nodes, one after another; none stands for all of them."""

    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NewRole:
    """This node goes as one that is drained, and a process of this role, attention or expert, starts in its place."""

    node: str
    role: str


@dataclass(frozen=True, slots=True)
class NewPhase:
    """This attention node computes prompts for others, or has them computed by others, or does both itself."""

    node: str
    phase: str


class FaultKind(StrEnum):
    """Killed; stopped for a while; or at a tenth of its speed for a while."""

    KILL = "kill"
    STOP = "stop"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Fault:
    """Break the process of this node on purpose. `seconds` is how long it is stopped or slow."""

    node: str
    fault: str
    seconds: float = field(default=0.0, metadata={"most": MOST_FAULT_SECONDS})


@dataclass(frozen=True, slots=True)
class End:
    """The whole run ends, as it does on SIGTERM: running requests have their time first."""


Change = ScaleTo | DrainOne | Restart | NewRole | NewPhase | Fault | End


class Form(Enum):
    """How a field of a change stands in a body."""

    TEXT = "text"  # a string, needed where the field has no default
    NUMBER = "number"  # from 0 to the field's `most`
    NAMES = "names"  # an array of strings; {"all": true} instead of none
    COUNTS = "counts"  # the body itself: a number, or a change of it, by pool


_FORMS = {str: Form.TEXT, float: Form.NUMBER, tuple: Form.NAMES, Mapping: Form.COUNTS}


@dataclass(frozen=True, slots=True)
class Argument:
    """A field of a change. It is needed where `default` is None; `most` is the largest number."""

    name: str
    form: Form
    default: Any
    most: float


@dataclass(frozen=True, slots=True)
class Verb:
    """POST /admin/NAME. `missing` is said where a body lacks what is needed; `whole_run`: of all models, not of one."""

    name: str
    change: type[Change]
    summary: str
    missing: str = ""
    whole_run: bool = False

    @property
    def path(self) -> str:
        return f"/admin/{self.name}"

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return tuple(
            Argument(
                each.name,
                _FORMS[get_origin(each.type) or each.type],  # type: ignore[index]
                None if each.default is MISSING else each.default,
                each.metadata.get("most", 0.0),
            )
            for each in fields(self.change)
        )

    def body(self, change: Change) -> dict[str, Any]:
        """What a client sends."""
        found: dict[str, Any] = {}
        for each in self.arguments:
            value = getattr(change, each.name)
            if each.form is Form.COUNTS:
                found |= value
            elif each.form is Form.NAMES and not value:
                found["all"] = True
            else:
                found[each.name] = list(value) if each.form is Form.NAMES else value
        return found


VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb(
            "scale",
            ScaleTo,
            "Other numbers of nodes.",
            'the body names no pool; send such as {"attention": "+1", "experts": 4}',
        ),
        Verb("drain", DrainOne, "Let a node go.", "node: is missing; /status has the names of all nodes"),
        Verb(
            "restart",
            Restart,
            "New processes for nodes.",
            'nodes: say which, {"nodes": ["expert-1"]}, or {"all": true}',
        ),
        Verb(
            "role",
            NewRole,
            "Another role for a node.",
            'say which node and its new role: {"node": "expert-2", "role": "attention"}',
        ),
        Verb(
            "phase",
            NewPhase,
            "Another phase for an attention node.",
            'say which node and its new phase: {"node": "attention-2", "phase": "prefill"}',
        ),
        Verb("down", End, "End the run.", whole_run=True),
        Verb(
            "fault",
            Fault,
            "Break a node on purpose.",
            'say which node and how: {"node": "expert-1", "fault": "kill"}',
        ),
    )
}


def verb_of(change: Change) -> Verb:
    return next(verb for verb in VERBS.values() if verb.change is type(change))


@dataclass(frozen=True, slots=True)
class Changed:
    """How many nodes of each pool are wanted now, who comes, who goes (both: gets a new process), and what to know."""

    counts: Mapping[str, int]
    coming: tuple[str, ...] = ()
    going: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)


def count_of(pool: str, now: int, wanted: str) -> int:
    """Raises ConfigError for what is no number of nodes."""
    signed = wanted[:1] in ("+", "-")
    digits = wanted[1:] if signed else wanted
    if not digits.isascii() or not digits.isdecimal() or len(digits) > _LONGEST:
        raise ConfigError(
            f"{pool}: {shown(wanted)} is no number of nodes, such as 3, and no change of it, such as +1 or -1",
            param=pool,
        )
    return now + int(wanted) if signed else int(wanted)
