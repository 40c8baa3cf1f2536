"""FlashInfer's norms and decode attention as this project's ops, and the tests that they have to pass first.

Signatures are those of flashinfer-python 0.6: `norm.rmsnorm`, `norm.fused_add_rmsnorm` and
`decode.trtllm_batch_decode_with_kv_cache`, which reads a cache of (N, G, B, D) blocks by a block table and lengths on
the device, as ours lie ("HND"). Its sampling is not used: a draw here has to be the CPU's for the same seed. Shapes as
in `reference.py`.
"""

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from afserve.kernels.devices import scratch
from afserve.kernels.libraries.library import HALVES, Library
from afserve.kernels.libraries.tested import WrongAnswer, expect_close
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference import Reference

_SEED = 38


class Adapter(Library):
    DISTRIBUTION, OLDEST = "flashinfer-python", "0.6"

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        super().__init__(module, device)
        self._norm, self._decode = (import_module(f"{module.__name__}.{part}") for part in ("norm", "decode"))
        self._workspace_Y: Tensor | None = None

    def norm_rows(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor | None:
        if not _plain(x_TH, weight_H):
            return None
        size = _row(x_TH.shape[-1], x_TH.dtype)
        return self.ops.compute_tested("rms_norm", size, lambda: self._plain_norm(x_TH, weight_H, eps))

    def norm_sums(self, x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor | None:
        if not _plain(x_TH, weight_H) or y_TH.dtype is not x_TH.dtype or not y_TH.is_contiguous():
            return None
        size = _row(x_TH.shape[-1], x_TH.dtype)
        return self.ops.compute_tested(
            "add_rms_norm", size, lambda: self._summed_norm(x_TH, y_TH, weight_H, eps)
        )

    def attend_decode(
        self,
        q_TAD: Tensor,
        k_NGBD: Tensor,
        v_NGBD: Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None,
    ) -> Tensor | None:
        one_each = batch.max_query == 1 and batch.tokens == batch.sequences > 0
        if not one_each or q_TAD.dtype is not k_NGBD.dtype:
            return None
        size = _heads(q_TAD.shape[1], k_NGBD, v_NGBD, window)
        call = partial(self._attend, q_TAD, k_NGBD, v_NGBD, batch, scale, window)
        return self.ops.compute_tested("attend_gqa", size, call)

    def test_norms(self, hidden: int, dtype: torch.dtype) -> None:
        if dtype in HALVES:
            size = _row(hidden, dtype)
            self.ops.test_op("rms_norm", size, lambda: self._test_norm(hidden, dtype))
            self.ops.test_op("add_rms_norm", size, lambda: self._test_add(hidden, dtype))

    def test_attention(
        self, heads: int, k_NGBD: Tensor, v_NGBD: Tensor, scale: float, window: int | None
    ) -> None:
        if k_NGBD.dtype in HALVES and k_NGBD.shape == v_NGBD.shape:
            size = _heads(heads, k_NGBD, v_NGBD, window)
            shape = k_NGBD.shape[1:]
            self.ops.test_op(
                "attend_gqa", size, lambda: self._test_attention(heads, shape, k_NGBD.dtype, scale, window)
            )

    def _plain_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        normed: Tensor = self._norm.rmsnorm(x_TH, weight_H, eps=eps)
        return normed

    def _summed_norm(self, x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """Its `input` becomes the norm, which here may not be y_TH."""
        normed_TH = y_TH.clone()
        self._norm.fused_add_rmsnorm(normed_TH, x_TH, weight_H, eps=eps)
        return normed_TH

    def _attend(
        self,
        q_TAD: Tensor,
        k_NGBD: Tensor,
        v_NGBD: Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """`window_left` does not count the token itself."""
        if self._workspace_Y is None:
            self._workspace_Y = torch.zeros(scratch.FLASHINFER, dtype=torch.uint8, device=self._device)
        seen: Tensor = self._decode.trtllm_batch_decode_with_kv_cache(
            q_TAD.contiguous(),
            (k_NGBD, v_NGBD),
            self._workspace_Y,
            batch.block_table_SB,
            batch.context_S,
            batch.max_context,
            bmm1_scale=scale,
            bmm2_scale=1.0,
            window_left=-1 if window is None else window - 1,
            kv_layout="HND",
        )
        return seen

    def _test_norm(self, hidden: int, dtype: torch.dtype) -> None:
        x, weight = self._rows(hidden, dtype)
        before, truth = x.clone(), Reference(self._device).rms_norm(x, weight, 1e-6)
        expect_close("rms_norm", self._plain_norm(x, weight, 1e-6), truth)
        _expect_kept("x", x, before)

    def _test_add(self, hidden: int, dtype: torch.dtype) -> None:
        x, weight = self._rows(hidden, dtype)
        y = x.flip(1).nan_to_num(1.0)
        sums, before = x.clone(), y.clone()
        truth = Reference(self._device).add_rms_norm(x, y, weight, 1e-6)
        expect_close("add_rms_norm", self._summed_norm(sums, y, weight, 1e-6), truth)
        expect_close("the sum", sums, x)
        _expect_kept("y", y, before)

    def _rows(self, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Five rows of which one has a NaN, and a norm's weights."""
        numbers = torch.randn(6, hidden, generator=torch.Generator().manual_seed(_SEED)).to(dtype)
        rows = numbers[:5].to(self._device)
        rows[3, hidden // 2] = float("nan")
        return rows, 1 + numbers[5].to(self._device) / 8

    def _test_attention(
        self, heads: int, shape: Sequence[int], dtype: torch.dtype, scale: float, window: int | None
    ) -> None:
        """Contexts of one token, of whole blocks and of several, in blocks in any order; blocks of nobody are NaN."""
        groups, block, size = shape
        contexts = (1, block, 2 * block + 3)
        generator = torch.Generator().manual_seed(_SEED)
        k, v = (torch.randn(7, groups, block, size, generator=generator).to(dtype) for _ in "kv")
        table = torch.tensor([[5, 6, 6], [3, 6, 6], [4, 0, 2]], dtype=torch.int32)
        for cache in (k, v):
            cache[[1, 6]] = float("nan")
            cache[5, :, 1:] = cache[2, :, 3:] = float("nan")
        q = torch.randn(3, heads, size, generator=generator).to(dtype)
        batch = _decode_batch(contexts, table, self._device)
        q, k, v = (x.to(self._device) for x in (q, k, v))
        truth = Reference(self._device).attend_gqa(q, k.float(), v.float(), batch, scale, window)
        expect_close("attend_gqa", self._attend(q, k, v, batch, scale, window), truth)


def _decode_batch(contexts: Sequence[int], table_SB: Tensor, device: torch.device) -> PagedBatch:
    count = torch.tensor(contexts, dtype=torch.int32, device=device)
    start_S1 = torch.arange(len(contexts) + 1, dtype=torch.int32, device=device)
    last = count.long() - 1
    return PagedBatch(last, last, start_S1, count, table_SB.to(device), 1, max(contexts))


def _expect_kept(name: str, tensor: Tensor, before: Tensor) -> None:
    if not torch.equal(tensor.nan_to_num(7.0), before.nan_to_num(7.0)):
        raise WrongAnswer(f"{name} was written to")


def _plain(x_TH: Tensor, weight_H: Tensor) -> bool:
    return x_TH.dim() == 2 and len(x_TH) > 0 and x_TH.is_contiguous() and weight_H.dtype is x_TH.dtype


def _row(hidden: int, dtype: torch.dtype) -> str:
    return f"rows of {hidden} in {dtype}"


def _heads(heads: int, k_NGBD: Tensor, v_NGBD: Tensor, window: int | None) -> str:
    groups, block, size = k_NGBD.shape[1:]
    seen = f", window {window}" if window else ""
    values = "" if v_NGBD.shape == k_NGBD.shape else f", values of {v_NGBD.shape[3]}"
    return f"{heads} over {groups} heads of {size}, blocks of {block}, {k_NGBD.dtype}{values}{seen}"
