"""The kinds of KV that a model may have, and which of its layers keep which: the one table that knows kinds.

A group has its own memory, pool and block table. The first one sees all tokens, and its blocks stand for all groups: a
name, a holder and a move are of such a block, with what the other groups keep of the same tokens. So a model with one
group has nothing more than its blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from afserve.config import EngineConfig
from afserve.kernels.cache import KeptShape
from afserve.spec import ModelSpec


class GroupKind(StrEnum):
    """What layers keep of a token: keys and values, of all tokens or of a window; MLA's latent, alone or with the keys
    of an indexer; or a state, of which only the last counts."""

    FULL = "full"
    WINDOW = "window"
    LATENT = "latent"
    INDEXED = "latent with index keys"
    STATE = "state"


# Tokens that a token reads, itself included; None: all before it. A window's is its own. A state stands behind a token.
_SEES: dict[GroupKind, int | None] = {
    GroupKind.FULL: None,
    GroupKind.LATENT: None,
    GroupKind.INDEXED: None,
    GroupKind.STATE: 2,
}


@dataclass(frozen=True, slots=True)
class KvGroup:
    """`layers` by number, `blocks` of `block_size` tokens each; a `window` counts the token itself."""

    kind: GroupKind
    layers: tuple[int, ...]
    blocks: int
    block_size: int
    window: int = 0

    @property
    def sees(self) -> int | None:
        """Tokens that a token reads, itself included; None: all before it."""
        return self.window if self.kind is GroupKind.WINDOW else _SEES[self.kind]


def one_group(layers: Sequence[KeptShape], blocks: int, block_size: int) -> tuple[KvGroup, ...]:
    """All layers together: what kernels that run a whole step in one call can read."""
    return (KvGroup(GroupKind.FULL, tuple(range(len(layers))), blocks, block_size),)


def groups_of(spec: ModelSpec, layers: int, config: EngineConfig) -> tuple[KvGroup, ...]:
    """Of so many layers, a drafting one behind the model's among them: those with windows apart where `config` says so;
    else none, and all layers are one group."""
    if not config.window_blocks:
        return ()
    windowed = spec.windowed_layers
    others = tuple(layer for layer in range(layers) if layer not in set(windowed))
    size = config.block_size
    return (
        KvGroup(GroupKind.FULL, others, config.kv_blocks, size),
        KvGroup(GroupKind.WINDOW, windowed, config.window_blocks, size, spec.widest_window),
    )


def check_groups(groups: Sequence[KvGroup], layers: int, step_tokens: int) -> None:
    """Raises ValueError that names the first group which does not fit the others, so many layers, or a sequence of
    which a step computes so many tokens."""
    first, *others = groups
    if first.sees is not None:
        raise ValueError(
            f"groups: the first one is of the kind {first.kind}; begin with one that sees all tokens"
        )
    if sorted(layer for group in groups for layer in group.layers) != list(range(layers)):
        raise ValueError(f"groups: each of {layers} layers has to be in one of them")
    for group in others:
        per = first.block_size // group.block_size
        if per * group.block_size != first.block_size:
            raise ValueError(
                f"groups: {group.kind} has blocks of {group.block_size} tokens, which are no part of {first.block_size}"
            )
        if group.sees is None and group.blocks != first.blocks * per:
            raise ValueError(
                f"groups: {group.kind} has {group.blocks} blocks, {first.blocks * per} hold the tokens of the first one"
            )
        # What a token sees, and what a step computes, may begin and end within a block.
        least = per * (-(-(group.sees or 0) // first.block_size) + -(-step_tokens // first.block_size) + 2)
        if group.sees is not None and group.blocks < least:
            raise ValueError(f"groups: {group.kind} has {group.blocks} blocks, one sequence needs {least}")
