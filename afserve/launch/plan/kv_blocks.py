"""How many tokens a block of the KV cache has, and what a token costs there.

A block also holds the states of layers that have them (kernels/delta.py). Unless the user says how long blocks are,
they are so long that states take no more memory than keys and values do. It knows no machine.
"""

from afserve.config import BLOCK_TOKENS
from afserve.spec import ModelSpec

_PLAIN = 16  # tokens: a tile of the native kernels
_FEWEST = 8  # blocks of a cache whose size is given, so that several requests fit into it


def block_size(spec: ModelSpec, element: int, asked: int | None, kv_tokens: int | None = None) -> int:
    """Tokens, `asked` if that is a number. `element`: bytes of a key's or a value's number. `kv_tokens`: of a node's
    whole cache, where they are given."""
    if asked is not None:
        return asked
    states, token = spec.state_bytes(), spec.kv_bytes_per_token(element)
    if not states:
        return _PLAIN
    longest = int(BLOCK_TOKENS.high)
    balanced = -(-states // (token * _PLAIN)) * _PLAIN if token else longest
    if kv_tokens is not None:
        longest = max(_PLAIN, min(longest, kv_tokens // _FEWEST // _PLAIN * _PLAIN))
    return min(balanced, longest)


def per_token(spec: ModelSpec, element: int, asked: int | None = None, kv_tokens: int | None = None) -> int:
    """Bytes of a cache of such blocks for each token that it holds."""
    return spec.kv_bytes_per_token(element, block_size(spec, element, asked, kv_tokens))
