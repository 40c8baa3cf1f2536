"""Causal attention with a hand-written backward pass, blocked over queries.

Knows no projection and no rotary embedding. torch's own backward takes most of a step on a CPU with
bfloat16 matrix units; blocks of plain batched products keep those units busy. Shapes: N = batch x heads,
S = sequence, D = head.
"""

from typing import Any

import torch
from torch import Tensor

BLOCK = 256


class CausalAttention(torch.autograd.Function):
    """softmax(q k^T) v, each query seeing itself and what is before it; q comes scaled."""

    @staticmethod
    def forward(ctx: Any, q_NSD: Tensor, k_NSD: Tensor, v_NSD: Tensor) -> Tensor:
        out_NSD = torch.empty_like(v_NSD)
        future = torch.full((BLOCK, BLOCK), float("-inf"), dtype=q_NSD.dtype).triu_(1)
        probabilities = []
        for start in range(0, q_NSD.shape[1], BLOCK):
            stop = min(start + BLOCK, q_NSD.shape[1])
            score = torch.bmm(q_NSD[:, start:stop], k_NSD[:, :stop].transpose(1, 2))
            score[:, :, start:].add_(future[: stop - start, : stop - start])
            p = torch.softmax(score, -1)
            out_NSD[:, start:stop] = torch.bmm(p, v_NSD[:, :stop])
            probabilities.append(p)
        ctx.save_for_backward(q_NSD, k_NSD, v_NSD, *probabilities)
        return out_NSD

    @staticmethod
    def backward(ctx: Any, grad_NSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *probabilities = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block, p in enumerate(probabilities):
            rows = slice(block * BLOCK, block * BLOCK + p.shape[1])
            seen = slice(0, p.shape[2])
            grad, query = grad_NSD[:, rows].contiguous(), q[:, rows].contiguous()
            dv[:, seen] += torch.bmm(p.transpose(1, 2), grad)
            dp = torch.bmm(grad, v[:, seen].transpose(1, 2))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            dq[:, rows] = torch.bmm(ds, k[:, seen])
            dk[:, seen] += torch.bmm(ds.transpose(1, 2), query)
        return dq, dk, dv
