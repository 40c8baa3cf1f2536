"""Where a cache's tensor lies in host memory, as numbers for the native library. It knows no torch."""

from typing import NamedTuple


class MemoryPart(NamedTuple):
    """The address of the first block, the bytes of a block there and from one block to the next, and how they lie
    (native/block_order.h): the layout's code, and of tiles the elements of a token's head and the bytes of one."""

    address: int
    bytes: int
    pitch: int
    layout: int = 0
    size: int = 0
    item: int = 0
