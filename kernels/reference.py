"""Every op in plain PyTorch: the oracle of the tests, and the path where nothing faster is at hand.

It knows no backends and checks no arguments (`ops.py` did). Shapes: T tokens, S sequences, H hidden,
E experts, K top-k, R rows, I inner size, A query heads, G key/value heads, D head size, C latent rank,
N cache blocks, B block size.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from afserve.errors import ConfigError
from afserve.kernels.layer import GqaLayer, Half
from afserve.kernels.packed import PackedExperts, PackedHeads, PackedLinear, int8_rounded
from afserve.kernels.paged import PagedBatch
from afserve.kernels.routing import RouterRule, Scoring, Selection
from afserve.kernels.scaled import BlockScaled

CACHE_LINE, HUGE_PAGE = 64, 1 << 21


class Reference:
    """Stateless; a class only so that every backend is one object of the same protocol."""

    name = "torch"
    holds_fp8 = False  # whether expert slots can keep e4m3 blocks

    def explain(self) -> str:
        return f"PyTorch {torch.__version__}"

    def pack_linear(self, weight_OI: Tensor, bias_O: Tensor | None, int8: bool = False) -> PackedLinear:
        outputs, inputs = weight_OI.shape
        kept = int8_rounded(weight_OI).to(weight_OI.dtype) if int8 else weight_OI
        return PackedLinear(outputs, inputs, kept, bias_O, dtype=weight_OI.dtype)

    def pack_heads(self, weight_AOI: Tensor) -> PackedHeads:
        heads, outputs, inputs = weight_AOI.shape
        return PackedHeads(heads, outputs, inputs, weight_AOI, dtype=weight_AOI.dtype)

    def linear_heads(self, x_TAI: Tensor, packed: PackedHeads) -> Tensor:
        assert packed.weight_AOI is not None
        return torch.bmm(x_TAI.transpose(0, 1), packed.weight_AOI.transpose(1, 2)).transpose(0, 1)

    def head_top_k(self, x_TH: Tensor, packed: PackedLinear, k: int) -> tuple[Tensor, Tensor]:
        value, index = self.logits(x_TH, packed).sort(dim=-1, descending=True, stable=True)
        return value[:, :k], index[:, :k].int()

    def argmax(self, logits_RV: Tensor) -> Tensor:
        return logits_RV.argmax(-1).int()

    def empty_experts(
        self, slots: int, hidden: int, inner: int, dtype: torch.dtype, int8: bool = False
    ) -> PackedExperts:
        gate_up = torch.zeros((slots, 2 * inner, hidden), dtype=dtype)
        down = torch.zeros((slots, hidden, inner), dtype=dtype)
        return PackedExperts(slots, hidden, inner, gate_up, down, dtype=dtype, int8=int8)

    def set_expert(self, experts: PackedExperts, slot: int, gate_up_JH: Tensor, down_HI: Tensor) -> None:
        assert experts.gate_up_EJH is not None and experts.down_EHI is not None
        experts.gate_up_EJH[slot] = int8_rounded(gate_up_JH) if experts.int8 else gate_up_JH
        experts.down_EHI[slot] = int8_rounded(down_HI) if experts.int8 else down_HI

    def empty_experts_fp8(self, slots: int, hidden: int, inner: int, dtype: torch.dtype) -> PackedExperts:
        raise ConfigError(
            f"experts: the {self.name} backend keeps no FP8 weights; load them de-quantised, or use a CUDA device "
            "of compute capability 8.9 or newer"
        )

    def set_expert_fp8(
        self, experts: PackedExperts, slot: int, gate: BlockScaled, up: BlockScaled, down: BlockScaled
    ) -> None:
        gate_up = torch.cat((gate.dequantised(), up.dequantised()))
        self.set_expert(experts, slot, gate_up.to(experts.dtype), down.dequantised().to(experts.dtype))

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x = x_TH.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return weight_H * x.to(x_TH.dtype)

    def add_sums(self, x_TH: Tensor, y_TH: Tensor) -> None:
        x_TH += y_TH

    def add_rms_norm(self, x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x_TH += y_TH
        return self.rms_norm(x_TH, weight_H, eps)

    def linear(self, x_TI: Tensor, packed: PackedLinear) -> Tensor:
        assert packed.weight_OI is not None
        return F.linear(x_TI, packed.weight_OI, packed.bias_O)

    def logits(self, x_TH: Tensor, packed: PackedLinear) -> Tensor:
        return self.linear(x_TH, packed).float()

    def mlp(self, x_TH: Tensor, gate_up: PackedLinear, down: PackedLinear) -> Tensor:
        gate, up = self.linear(x_TH, gate_up).chunk(2, dim=-1)
        return self.linear(F.silu(gate) * up, down)

    def rope(
        self, x_TAD: Tensor, cos_PD: Tensor, sin_PD: Tensor, position_T: Tensor, interleaved: bool
    ) -> Tensor:
        cos = cos_PD[position_T].unsqueeze(1)
        sin = sin_PD[position_T].unsqueeze(1)
        x = x_TAD.float()
        if interleaved:
            first, second = x[..., 0::2], x[..., 1::2]
        else:
            first, second = x.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(x_TAD.dtype)

    def empty_cache(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Pages that are zero until touched: torch.zeros would write, and so occupy, all of them at once."""
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        size = math.prod(shape) * dtype.itemsize
        align = (
            HUGE_PAGE if size >= HUGE_PAGE else CACHE_LINE
        )  # malloc's own alignment splits every row over lines
        untouched = np.zeros(size + align, dtype=np.uint8)
        first = -untouched.ctypes.data % align
        return torch.from_numpy(untouched[first : first + size]).view(dtype).view(shape)

    def empty_kv(
        self,
        shape: tuple[int, int, int],
        sizes: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        return (
            self.empty_cache((*shape, sizes[0]), dtype, device),
            self.empty_cache((*shape, sizes[1]), dtype, device),
        )

    def write_kv(
        self, k_TGD: Tensor, v_TGD: Tensor, k_NGBD: Tensor, v_NGBD: Tensor, kv_slot_T: Tensor
    ) -> None:
        size = k_NGBD.shape[2]
        block, offset = kv_slot_T // size, kv_slot_T % size
        k_NGBD[block, :, offset] = k_TGD
        v_NGBD[block, :, offset] = v_TGD

    def write_latent(self, latent_TC: Tensor, cache_NBC: Tensor, kv_slot_T: Tensor) -> None:
        cache_NBC.view(-1, cache_NBC.shape[-1])[kv_slot_T] = latent_TC

    def attend_gqa(
        self,
        q_TAD: Tensor,
        k_NGBD: Tensor,
        v_NGBD: Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None,
        sink_A: Tensor | None = None,
    ) -> Tensor:
        _, heads, _ = q_TAD.shape
        groups = k_NGBD.shape[1]
        out = torch.empty((q_TAD.shape[0], heads, v_NGBD.shape[3]), dtype=q_TAD.dtype, device=q_TAD.device)
        for start, stop, context, blocks in sequences(batch, k_NGBD.shape[2]):
            k_GCD = k_NGBD[blocks].transpose(0, 1).flatten(1, 2)[:, :context].float()
            v_GCD = v_NGBD[blocks].transpose(0, 1).flatten(1, 2)[:, :context].float()
            q_AQD = q_TAD[start:stop].transpose(0, 1).float()
            repeat = heads // groups
            scores = q_AQD @ k_GCD.repeat_interleave(repeat, 0).transpose(1, 2) * scale
            scores = scores.masked_fill(~visible(stop - start, context, window, q_TAD.device), float("-inf"))
            if sink_A is not None:
                column = sink_A.float()[:, None, None].expand(-1, scores.shape[1], 1)
                weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            out[start:stop] = (weights @ v_GCD.repeat_interleave(repeat, 0)).transpose(0, 1).to(out.dtype)
        return out

    def attend_mla(
        self, q_TAC: Tensor, cache_NBC: Tensor, rank: int, batch: PagedBatch, scale: float
    ) -> Tensor:
        out = torch.empty((*q_TAC.shape[:2], rank), dtype=q_TAC.dtype, device=q_TAC.device)
        for start, stop, context, blocks in sequences(batch, cache_NBC.shape[1]):
            latent = cache_NBC[blocks].flatten(0, 1)[:context].float()
            scores = q_TAC[start:stop].transpose(0, 1).float() @ latent.t() * scale
            scores = scores.masked_fill(~visible(stop - start, context, None, q_TAC.device), float("-inf"))
            out[start:stop] = (scores.softmax(-1) @ latent[:, :rank]).transpose(0, 1).to(out.dtype)
        return out

    def prepare_gqa(self, layer: GqaLayer) -> GqaLayer:
        return layer

    def bind_cache(self, k_NGBD: Tensor, v_NGBD: Tensor) -> object | None:
        """What a backend wants to know of a layer's cache in every step."""
        return None

    def gqa_half(
        self, x_TH: Tensor, layer: GqaLayer, k_NGBD: Tensor, v_NGBD: Tensor, batch: PagedBatch
    ) -> Half:
        heads, groups = layer.heads, layer.groups
        normed = self.rms_norm(x_TH, layer.input_norm_H, layer.eps)
        qkv = self.linear(normed, layer.qkv).view(-1, heads + 2 * groups, layer.head_dim)
        q, k, v = qkv.split((heads, groups, groups), dim=1)
        if layer.q_norm_D is not None:
            q = self.rms_norm(q, layer.q_norm_D, layer.eps)
        if layer.k_norm_D is not None:
            k = self.rms_norm(k, layer.k_norm_D, layer.eps)
        q = self.rope(q, layer.cos_PD, layer.sin_PD, batch.position_T, False)
        k = self.rope(k, layer.cos_PD, layer.sin_PD, batch.position_T, False)
        self.write_kv(k, v, k_NGBD, v_NGBD, batch.kv_slot_T)
        seen = self.attend_gqa(q, k_NGBD, v_NGBD, batch, layer.scale, layer.window)
        normed = self.add_rms_norm(
            x_TH, self.linear(seen.flatten(1), layer.out), layer.post_norm_H, layer.eps
        )
        if layer.gate_EH is None or layer.rule is None:
            return Half(normed, None, None)
        return Half(normed, *self.route(normed, layer.gate_EH, layer.bias_E, layer.rule))

    def route(
        self, x_TH: Tensor, gate_EH: Tensor, bias_E: Tensor | None, rule: RouterRule
    ) -> tuple[Tensor, Tensor]:
        logits_TE = F.linear(x_TH.float(), gate_EH.float())
        return choose(logits_TE, bias_E, rule)

    def expert_ffn(
        self,
        x_RH: Tensor,
        slot_RK: Tensor,
        weight_RK: Tensor,
        experts: PackedExperts,
        out_RH: Tensor,
        add: bool,
    ) -> None:
        assert experts.gate_up_EJH is not None and experts.down_EHI is not None
        total = out_RH.float() if add else torch.zeros(x_RH.shape, dtype=torch.float32, device=x_RH.device)
        for slot in torch.unique(slot_RK).tolist():
            if slot < 0:
                continue
            row, choice = torch.where(slot_RK == slot)
            gate, up = F.linear(x_RH[row], experts.gate_up_EJH[slot]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, experts.down_EHI[slot]).float()
            part = y * weight_RK[row, choice].float()[:, None]
            total.index_add_(0, row, part.to(x_RH.dtype).float())
        out_RH.copy_(total)


def sequences(batch: PagedBatch, block_size: int) -> list[tuple[int, int, int, Tensor]]:
    """(first token, past-the-last token, context, block ids) of every sequence."""
    starts = batch.query_start_S1.tolist()
    contexts = batch.context_S.tolist()
    return [
        (starts[s], starts[s + 1], context, batch.block_table_SB[s, : -(-context // block_size)].long())
        for s, context in enumerate(contexts)
    ]


def visible(queries: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """Causal mask of the last `queries` of `context` positions; `window` counts the token itself."""
    query = torch.arange(context - queries, context, device=device)[:, None]
    key = torch.arange(context, device=device)[None, :]
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    return mask


def choose(logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
    """(expert_TK int32, weight_TK float32) by the family's rule. Sources: the transformers modules that
    FIELD.md's table names; ties go to the lower expert id, as torch.topk on CPU does for distinct values."""
    if rule.scoring is Scoring.SIGMOID:
        score_TE = logits_TE.sigmoid()
    elif rule.scoring is Scoring.SOFTMAX:
        score_TE = logits_TE.softmax(-1)
    else:
        score_TE = logits_TE
    ranked_TE = score_TE if bias_E is None else score_TE + bias_E.float()
    if rule.groups > 1 and rule.selection is not Selection.PLAIN:
        ranked_TE = ranked_TE.masked_fill(~_open_groups(ranked_TE, rule), rule.closed_value)
    expert_TK = ranked_TE.topk(rule.top_k, dim=-1, sorted=True).indices
    weight_TK = score_TE.gather(1, expert_TK)
    if rule.scoring is Scoring.TOPK_SOFTMAX:
        weight_TK = weight_TK.softmax(-1)
    if rule.renormalise:
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + rule.epsilon)
    return expert_TK.int(), weight_TK * rule.scale


def _open_groups(ranked_TE: Tensor, rule: RouterRule) -> Tensor:
    tokens, experts = ranked_TE.shape
    grouped = ranked_TE.view(tokens, rule.groups, experts // rule.groups)
    if rule.selection is Selection.GROUP_TOP2_SUM:
        value = grouped.topk(2, dim=-1).values.sum(-1)
    else:
        value = grouped.amax(-1)
    keep = torch.zeros_like(value, dtype=torch.bool)
    keep.scatter_(1, value.topk(rule.top_groups, dim=-1).indices, True)
    return keep.unsqueeze(-1).expand_as(grouped).reshape(tokens, experts)
