"""Who a node is: its role and index as one value, and which of its lives, as another. What people read is made from
these; nothing parses that back.

It knows no process, no host and no state; a leaf that every room may use.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated


class Role(StrEnum):
    """What a node does. Its phase (prefill, decode or both) may change, its role only with a restart."""

    ATTENTION = "attention"
    EXPERT = "expert"
    GATEWAY = "gateway"


class AttentionPhase(StrEnum):
    """What an attention node does at present. A prefill node computes prompts for decode nodes, which do the rest."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


MODEL_ROLES = (Role.ATTENTION, Role.EXPERT)  # those that hold weights
MOST_NODES = 1024  # of a role
MOST_GATEWAYS = 64


@dataclass(frozen=True, slots=True, order=True)
class NodeId:
    """`index` counts from 0 within the role; an index stays with its place when others leave."""

    role: Role
    index: int

    def __str__(self) -> str:
        """As people and logs name it, such as `expert-3`."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class Life:
    """One life of a node: a node that comes back is the same node, with the next generation."""

    node: NodeId
    generation: int

    @property
    def index(self) -> int:
        return self.node.index

    def __str__(self) -> str:
        """People speak of the node."""
        return str(self.node)


# Where a message has no room for the role, as it is always the same.
AttentionLife = Annotated[Life, Role.ATTENTION]
ExpertLife = Annotated[Life, Role.EXPERT]


def attention_node(index: int) -> NodeId:
    return NodeId(Role.ATTENTION, index)


def expert_node(index: int) -> NodeId:
    return NodeId(Role.EXPERT, index)


def attention_life(index: int, generation: int) -> Life:
    return Life(attention_node(index), generation)


def expert_life(index: int, generation: int) -> Life:
    return Life(expert_node(index), generation)
