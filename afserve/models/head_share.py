"""A device's share of a layer's heads, where a node has several devices: which rows and columns of weights are its own.

Each device has the keys and values that its query heads read, and computes what its heads add to the residual stream
(`add_heads` of models/attention.py). The sum over devices goes into `Ops.join_half` on the one that leads, which has
the residual stream, routers, FFNs and both ends. Shapes: R rows, H hidden.
"""

from dataclasses import dataclass

from torch import Tensor

from afserve.models.dense import Rows


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Part `index` of `count` equal ones of a layer's query heads, and the key/value heads that these read: several
    devices keep the same one where there are fewer than devices. The first one adds the output's bias."""

    index: int = 0
    count: int = 1

    def heads_of(self, heads: int) -> int:
        return max(heads // self.count, 1)

    def cut_rows(self, x_R: Rows, heads: int) -> Rows:
        """The share's own, rows or numbers, out of those of `heads` one after the other."""
        size, first = len(x_R) // heads, self.index * heads // self.count
        return x_R[first * size : (first + self.heads_of(heads)) * size]

    def cut_columns(self, x_HR: Tensor, heads: int) -> Tensor:
        return self.cut_rows(x_HR.T, heads).T.contiguous()


ALL_HEADS = HeadShare()
