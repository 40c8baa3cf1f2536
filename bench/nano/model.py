"""nano as a trainable module: DeepSeek-V3 with its MTP module, over flat rows of tokens.

Knows no file and no optimizer. Letters: T = rows x sequence tokens, H hidden, K choices, E experts, N heads.
The arithmetic follows transformers' modeling_deepseek_v3; only attention, the routed experts and the loss have
hand-written backward passes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.nano.attention import CausalAttention
from bench.nano.experts import RoutedExperts
from bench.nano.loss import HeadLoss
from bench.nano.shape import Shape


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved pairs in, halves out (as DeepSeek stores them)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


def matrix(out: int, inner: int, *, gain: float = 1.0, stack: int = 0) -> nn.Parameter:
    shape = (stack, out, inner) if stack else (out, inner)
    return nn.Parameter(torch.randn(shape) * (gain * inner**-0.5))


def ones(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


@dataclass(frozen=True, slots=True)
class Angles:
    """cos and sin of every position of a batch, (T, rope / 2), and the sequence length."""

    cos: Tensor
    sin: Tensor
    length: int

    @classmethod
    def build(cls, shape: Shape, rows: int, length: int, dtype: torch.dtype) -> "Angles":
        power = torch.arange(0, shape.rope, 2).float() / shape.rope
        angle = torch.outer(torch.arange(length).float(), 1.0 / shape.theta**power).repeat(rows, 1)
        return cls(angle.cos().to(dtype), angle.sin().to(dtype), length)


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_a_proj = matrix(s.q_rank, s.hidden)
        self.q_a_layernorm = ones(s.q_rank)
        self.q_b_proj = matrix(s.heads * s.head_dim, s.q_rank)
        self.kv_a_proj_with_mqa = matrix(s.kv_rank + s.rope, s.hidden)
        self.kv_a_layernorm = ones(s.kv_rank)
        self.kv_b_proj = matrix(s.heads * (s.nope + s.value), s.kv_rank)
        self.o_proj = matrix(s.hidden, s.heads * s.value, gain=0.1)

    def forward(self, x_TH: Tensor, angles: Angles) -> Tensor:
        q, k, v = self.project(x_TH, angles.cos, angles.sin)
        out = CausalAttention.apply(*(self._split(part, angles.length) for part in (q, k, v)))
        out = out.view(-1, self.s.heads, angles.length, self.s.value).transpose(1, 2)
        return F.linear(out.reshape(x_TH.shape[0], -1), self.o_proj)

    def project(self, x_TH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, tokens = self.s, x_TH.shape[0]
        q = F.linear(rms_norm(F.linear(x_TH, self.q_a_proj), self.q_a_layernorm), self.q_b_proj)
        q = q * s.head_dim**-0.5
        q_pass, q_turn = q.view(tokens, s.heads, s.head_dim).split([s.nope, s.rope], -1)
        latent, k_turn = F.linear(x_TH, self.kv_a_proj_with_mqa).split([s.kv_rank, s.rope], -1)
        kv = F.linear(rms_norm(latent, self.kv_a_layernorm), self.kv_b_proj)
        k_pass, v = kv.view(tokens, s.heads, s.nope + s.value).split([s.nope, s.value], -1)
        cos, sin = cos[:, None], sin[:, None]
        k_turn = rotate(k_turn[:, None], cos, sin).expand(-1, s.heads, -1)
        return torch.cat([q_pass, rotate(q_turn, cos, sin)], -1), torch.cat([k_pass, k_turn], -1), v

    @torch.no_grad()
    def look_back(self, common_H: Tensor) -> None:
        """Start heads 0, 1, 2 at the token one, two, three places back.

        `common` is a direction that all embeddings share; only through it can attention see position alone.
        Copying what followed an earlier occurrence needs such heads, and learning them takes a short run's half.
        """
        s, pairs = self.s, min(6, self.s.rope // 2)
        angle_P = s.theta ** -(torch.arange(pairs) * 2 / s.rope)
        turn = self.kv_a_proj_with_mqa[s.kv_rank :].mul_(0.1)
        turn[0 : 2 * pairs : 2] += 0.7 * common_H
        self.q_a_proj[0] = common_H
        q_NDR = self.q_b_proj.view(s.heads, s.head_dim, s.q_rank)
        for head in range(min(3, s.heads - 1)):
            query = q_NDR[head, s.nope :].mul_(0.1)
            query[0 : 2 * pairs : 2, 0] += 0.7 * torch.cos(angle_P * (head + 1))
            query[1 : 2 * pairs : 2, 0] -= 0.7 * torch.sin(angle_P * (head + 1))
            q_NDR[head, : s.nope].mul_(0.3)

    def _split(self, x: Tensor, length: int) -> Tensor:
        """(T, N, D) to contiguous (batch x N, S, D)."""
        wide = x.view(-1, length, self.s.heads, x.shape[-1]).transpose(1, 2)
        return wide.reshape(-1, length, x.shape[-1])


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = matrix(inner, hidden)
        self.up_proj = matrix(inner, hidden)
        self.down_proj = matrix(hidden, inner, gain=0.1)

    def forward(self, x_TH: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x_TH, self.gate_proj)) * F.linear(x_TH, self.up_proj), self.down_proj)


class Moe(nn.Module):
    bias: Tensor
    load: Tensor

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.gate = matrix(s.experts, s.hidden)
        self.register_buffer("bias", torch.zeros(s.experts))
        self.register_buffer("load", torch.zeros(s.experts), persistent=False)
        self.gate_up = matrix(2 * s.expert_inter, s.hidden, stack=s.experts)
        self.down = matrix(s.hidden, s.expert_inter, gain=0.1, stack=s.experts)
        self.shared_experts = Mlp(s.hidden, s.shared * s.expert_inter)

    def forward(self, x_TH: Tensor) -> Tensor:
        expert_TK, weight_TK = self.route(x_TH)
        self.load += torch.bincount(expert_TK.reshape(-1), minlength=self.s.experts)
        routed_TH: Tensor = RoutedExperts.apply(x_TH, expert_TK, weight_TK, self.gate_up, self.down)
        shared_TH: Tensor = self.shared_experts(x_TH)
        return routed_TH + shared_TH

    def route(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Sigmoid scores; the bias chooses, the scores weigh; groups by the sum of their best two."""
        s = self.s
        score_TE = F.linear(x_TH.float(), self.gate.float()).sigmoid()
        choice_TE = score_TE.detach() + self.bias
        group_TG = choice_TE.view(-1, s.groups, s.experts // s.groups).topk(2, -1)[0].sum(-1)
        keep_TG = torch.zeros_like(group_TG).scatter_(1, group_TG.topk(s.top_groups, -1)[1], 1.0).bool()
        keep_TE = keep_TG.repeat_interleave(s.experts // s.groups, 1)
        expert_TK = choice_TE.masked_fill(~keep_TE, float("-inf")).topk(s.top_k, -1)[1]
        weight_TK = score_TE.gather(1, expert_TK)
        return expert_TK, weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20) * s.scale


class Layer(nn.Module):
    def __init__(self, s: Shape, *, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = ones(s.hidden)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = ones(s.hidden)
        self.mlp = Mlp(s.hidden, s.dense_inter) if dense else Moe(s)

    def forward(self, x_TH: Tensor, angles: Angles) -> Tensor:
        x_TH = x_TH + self.self_attn(rms_norm(x_TH, self.input_layernorm), angles)
        y_TH: Tensor = self.mlp(rms_norm(x_TH, self.post_attention_layernorm))
        return x_TH + y_TH


class Mtp(nn.Module):
    """Predicts the token after next from a hidden state and the next token's embedding."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = ones(s.hidden), ones(s.hidden), ones(s.hidden)
        self.eh_proj = matrix(s.hidden, 2 * s.hidden)
        self.layer = Layer(s, dense=False)

    def forward(self, embed_TH: Tensor, hidden_TH: Tensor, angles: Angles) -> Tensor:
        joined = torch.cat([rms_norm(embed_TH, self.enorm), rms_norm(hidden_TH, self.hnorm)], -1)
        return rms_norm(self.layer(F.linear(joined, self.eh_proj), angles), self.norm)


class Nano(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        common = torch.randn(s.hidden) * 0.05
        self.embed = nn.Parameter(torch.randn(s.vocab, s.hidden) * 0.05 + common)
        layers = [Layer(s, dense=i < s.dense_layers) for i in range(s.layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = ones(s.hidden)
        self.head = matrix(s.vocab, s.hidden, gain=0.1)
        self.mtp = Mtp(s)
        layers[0].self_attn.look_back(common / common.norm())

    def hidden(self, ids_BS: Tensor) -> tuple[Tensor, Angles]:
        """Last hidden states after the final norm, (T, H), and the angles they used."""
        rows, length = ids_BS.shape
        angles = Angles.build(self.s, rows, length, self.embed.dtype)
        x_TH = F.embedding(ids_BS.reshape(-1), self.embed)
        for layer in self.layers:
            x_TH = layer(x_TH, angles)
        return rms_norm(x_TH, self.norm), angles

    def losses(self, window: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Nats per token of the next token and of the one after it; window is (batch, S + 2).

        Where `counts` (batch, S + 2) is given, only targets that it names count.
        """
        x_TH, angles = self.hidden(window[:, :-2])
        main = self._loss(x_TH, window[:, 1:-1], None if counts is None else counts[:, 1:-1])
        embed_TH = F.embedding(window[:, 1:-1].reshape(-1), self.embed)
        y_TH = self.mtp(embed_TH, x_TH, angles)
        return main, self._loss(y_TH, window[:, 2:], None if counts is None else counts[:, 2:])

    def draft_losses(self, window: Tensor, counts: Tensor | None, chain: int) -> tuple[Tensor, Tensor]:
        """Nats per token of the next token, and of the model's own choice of the one after it under drafts.

        Drafts are made in `chain` passes of the module: the first reads the model's hidden states, each other one what
        the pass before made of the token before, as in serving. Their losses are averaged. As for `losses`; what the
        model would say behind a window's last token is not known and does not count.
        """
        x_TH, angles = self.hidden(window[:, :-2])
        main = self._loss(x_TH, window[:, 1:-1], None if counts is None else counts[:, 1:-1])
        rows, length = window.shape[0], angles.length
        own_BS = F.linear(x_TH.float(), self.head.float()).argmax(-1).view(rows, length).roll(-1, 1)
        counts_BS = torch.ones_like(own_BS, dtype=torch.bool) if counts is None else counts[:, 2:].clone()
        counts_BS[:, -1] = False
        embed_TH = F.embedding(window[:, 1:-1].reshape(-1), self.embed)
        read_TH, losses = x_TH, []
        for _ in range(chain):
            y_TH = self.mtp(embed_TH, read_TH, angles)
            losses.append(self._loss(y_TH, own_BS, counts_BS))
            before_BSH = y_TH.view(rows, length, -1)[:, :-1]
            read_TH = torch.cat([x_TH.view(rows, length, -1)[:, :1], before_BSH], 1).view_as(x_TH)
        return main, torch.stack(losses).mean()

    def _loss(self, x_TH: Tensor, target_BS: Tensor, counts_BS: Tensor | None) -> Tensor:
        target_T = target_BS.reshape(-1)
        if counts_BS is not None:
            keep = counts_BS.reshape(-1).nonzero()[:, 0]
            x_TH, target_T = x_TH.index_select(0, keep), target_T.index_select(0, keep)
        loss: Tensor = HeadLoss.apply(x_TH, self.head, target_T)
        return loss

    def moes(self) -> list[Moe]:
        return [module for module in self.modules() if isinstance(module, Moe)]
