"""What gateways ask attention nodes of the blocks that somebody asked to keep, and what those say."""

from dataclasses import dataclass

from afserve.engine.kv.retained import Owned


@dataclass(frozen=True, slots=True)
class AskCache:
    """To every attention node: say what you keep for `owner`, or for `everybody`; with `unpin` it is let go, the blocks
    of `prompt` alone where that has tokens."""

    query: int
    owner: str
    everybody: bool = False
    unpin: bool = False
    prompt: tuple[int, ...] = ()
    salt: str = ""


@dataclass(frozen=True, slots=True)
class KeptCache:
    """Of a node with so many `blocks` of `block_tokens` tokens and `block_bytes` bytes. `unpinned` are those let go;
    `owners` has what was kept before."""

    query: int
    blocks: int
    block_tokens: int
    block_bytes: int
    unpinned: int = 0
    owners: tuple[Owned, ...] = ()
