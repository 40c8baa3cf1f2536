"""Cross-entropy fused with the LM head: logits live one chunk at a time and gradients are made on the way.

Knows no model beyond its last hidden state and its head. T tokens, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK = 1024


class HeadLoss(torch.autograd.Function):
    """Mean negative log-likelihood (nats) of target_T under softmax(x head^T)."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, head_VH: Tensor, target_T: Tensor) -> Tensor:
        dx_TH, dhead_VH = torch.empty_like(x_TH), torch.zeros_like(head_VH, dtype=torch.float32)
        total = x_TH.new_zeros((), dtype=torch.float32)
        for start in range(0, x_TH.shape[0], CHUNK):
            rows = slice(start, min(start + CHUNK, x_TH.shape[0]))
            loss, grad_CV = chunk_loss(x_TH[rows] @ head_VH.t(), target_T[rows], 1.0 / x_TH.shape[0])
            total += loss
            if ctx.needs_input_grad[0]:
                dx_TH[rows] = grad_CV @ head_VH
            if ctx.needs_input_grad[1]:
                dhead_VH += grad_CV.t() @ x_TH[rows]
        ctx.save_for_backward(dx_TH, dhead_VH.to(head_VH.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dx_TH, dhead_VH = ctx.saved_tensors
        return dx_TH * grad.to(dx_TH.dtype), dhead_VH * grad.to(dhead_VH.dtype), None


def chunk_loss(logits_CV: Tensor, target_C: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Scaled sum of the negative log-likelihoods and its gradient by the logits."""
    wide_CV = logits_CV.float()
    normal_C1 = wide_CV.logsumexp(-1, keepdim=True)
    loss = (normal_C1 - wide_CV.gather(1, target_C[:, None])).sum() * scale
    hit_CV = torch.arange(logits_CV.shape[1])[None] == target_C[:, None]
    return loss, (((wide_CV - normal_C1).exp() - hit_CV.float()) * scale).to(logits_CV.dtype)
