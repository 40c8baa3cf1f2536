"""Muon for matrices, Adam for the rest, over float32 masters of bfloat16 parameters.

Knows no model but parameter names and shapes. Matrices of one shape are orthogonalised together.
Muon: Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon/).
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(grad_BOI: Tensor, rounds: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices by Newton-Schulz, in bfloat16."""
    a, b, c = COEFFICIENTS
    x = grad_BOI.bfloat16()
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT.contiguous() if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if wide else x


class Master:
    """A parameter's float32 value and its momenta."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.value = parameter.detach().float().clone()
        self.first = torch.zeros_like(self.value)
        self.second = torch.zeros_like(self.value)

    def take_grad(self) -> Tensor:
        assert self.parameter.grad is not None
        grad = self.parameter.grad.float()
        self.parameter.grad = None
        return grad

    def publish(self) -> None:
        self.parameter.data.copy_(self.value)

    def state(self) -> dict[str, Tensor]:
        return {"value": self.value, "first": self.first, "second": self.second}


class Muon:
    """Steps every matrix by its orthogonalised momentum."""

    def __init__(self, masters: Iterable[Master]) -> None:
        self.groups: dict[torch.Size, list[Master]] = {}
        for master in masters:
            self.groups.setdefault(master.value.shape[-2:], []).append(master)

    @torch.no_grad()
    def step(self, lr: float, momentum: float, decay: float) -> None:
        for (out, inner), masters in self.groups.items():
            updates = []
            for master in masters:
                grad = master.take_grad()
                master.first.lerp_(grad, 1 - momentum)
                updates.append(grad.lerp_(master.first, momentum).view(-1, out, inner))
            scale = lr * max(1.0, out / inner) ** 0.5
            parts = orthogonal(torch.cat(updates)).float().split([len(u) for u in updates])
            for master, part in zip(masters, parts, strict=True):
                master.value.mul_(1 - lr * decay).sub_(part.reshape(master.value.shape), alpha=scale)
                master.publish()


class Adam:
    """Steps embeddings, heads, routers and norms, each with its own rate."""

    def __init__(self, masters: Iterable[tuple[Master, float]]) -> None:
        self.masters = list(masters)

    @torch.no_grad()
    def step(self, factor: float, count: int, betas: tuple[float, float] = (0.9, 0.95)) -> None:
        one, two = betas
        for master, lr in self.masters:
            grad = master.take_grad()
            master.first.lerp_(grad, 1 - one)
            master.second.lerp_(grad.square_(), 1 - two)
            spread = (master.second / (1 - two**count)).sqrt_().add_(1e-8)
            master.value.addcdiv_(master.first, spread, value=-lr * factor / (1 - one**count))
            master.publish()
