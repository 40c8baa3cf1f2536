"""flash-linear-attention's gated delta rules, by head and by key channel (KDA), as moves of states.

Signatures are those of fla-core 0.6: `chunk_gated_delta_rule` and `chunk_kda` for a prompt's tokens within a block,
`fused_recurrent_gated_delta_rule` and `fused_recurrent_kda` for one token of each sequence. Rows are (B, T, V, K), a
state (B, V, K, D) in float32, as ours lie. The convolution, unit lengths and decays before them stay our own, and so
does the rule of a sum (Mamba-2). Prompts are multiplied in the rows' 16 bits, single tokens in float32. No call reads a
value back from the device; steps of single tokens may be captured, prompts are not. Shapes as in `delta.py`.
"""

from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from afserve.kernels.delta import DeltaShape
from afserve.kernels.libraries.library import HALVES, Library
from afserve.kernels.libraries.tested import expect_close
from afserve.kernels.states.rules import OWN, Rule, StateMoves, segments, step

STEP, PROMPT = "delta, one token", "delta, prompts"
_ENDLESS = 1 << 30  # a segment ends with its block
_TOKENS = 70  # more than a chunk of theirs, and no whole one
_SEED = 38


class Adapter(Library):
    DISTRIBUTION, OLDEST = "fla-core", "0.6"

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        super().__init__(module, device)
        gated, channels = (
            import_module(f"{module.__name__}.ops.{part}") for part in ("gated_delta_rule", "kda")
        )
        self._recurrent = {
            "head": gated.fused_recurrent_gated_delta_rule,
            "channel": channels.fused_recurrent_kda,
        }
        self._chunked = {"head": gated.chunk_gated_delta_rule, "channel": channels.chunk_kda}

    def moves(self, shape: DeltaShape, dtype: torch.dtype) -> StateMoves | None:
        size = _size(shape, dtype)
        moves = StateMoves(partial(self._step, size)) if self.ops.uses(STEP, size) else OWN
        if not self.ops.uses(PROMPT, size):
            return moves if moves is not OWN else None
        return replace(moves, segment=partial(self._segment, size, dtype), longest=_ENDLESS)

    def test_delta(self, shape: DeltaShape, dtype: torch.dtype) -> None:
        if shape.rule == "sum" or dtype not in HALVES:
            return
        size = _size(shape, dtype)
        self.ops.test_op(STEP, size, lambda: self._test_step(shape))
        self.ops.test_op(PROMPT, size, lambda: self._test_prompt(shape, dtype))

    def _step(
        self, size: str, q_SVK: Tensor, k_SVK: Tensor, v_SVD: Tensor, decay_SVE: Tensor, beta_SV: Tensor,
        state_SVKD: Tensor, rule: Rule,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rows = q_SVK, k_SVK, v_SVD, decay_SVE, beta_SV, state_SVKD, rule
        return self.ops.compute_tested(STEP, size, lambda: self._move_step(*rows)) or step(*rows)

    def _segment(
        self, size: str, dtype: torch.dtype, q_VLK: Tensor, k_VLK: Tensor, v_VLD: Tensor, decay_VLE: Tensor,
        beta_VL: Tensor, state_VKD: Tensor, rule: Rule,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rows = q_VLK, k_VLK, v_VLD, decay_VLE, beta_VL, state_VKD, rule
        return self.ops.compute_tested(PROMPT, size, lambda: self._move_segment(dtype, *rows)) or segments(
            *rows
        )

    def _move_step(
        self, q_SVK: Tensor, k_SVK: Tensor, v_SVD: Tensor, decay_SVE: Tensor, beta_SV: Tensor, state_SVKD: Tensor,
        rule: Rule,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Each sequence is one of a batch, of one token."""
        seen_S1VD, moved_SVKD = self._recurrent[rule](
            q=q_SVK[:, None],
            k=k_SVK[:, None],
            v=v_SVD[:, None],
            g=_decays(decay_SVE, rule)[:, None],
            beta=beta_SV[:, None],
            scale=1.0,
            initial_state=state_SVKD,
            output_final_state=True,
        )
        return seen_S1VD[:, 0], moved_SVKD

    def _move_segment(
        self, dtype: torch.dtype, q_VLK: Tensor, k_VLK: Tensor, v_VLD: Tensor, decay_VLE: Tensor, beta_VL: Tensor,
        state_VKD: Tensor, rule: Rule,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, v = (x.to(dtype).transpose(0, 1)[None] for x in (q_VLK, k_VLK, v_VLD))
        seen_1LVD, moved_1VKD = self._chunked[rule](
            q=q,
            k=k,
            v=v,
            g=_decays(decay_VLE, rule).transpose(0, 1)[None],
            beta=beta_VL.T[None],
            scale=1.0,
            initial_state=state_VKD[None],
            output_final_state=True,
        )
        return seen_1LVD[0].transpose(0, 1).float(), moved_1VKD[0]

    def _test_step(self, shape: DeltaShape) -> None:
        """Three sequences, of which one is no number."""
        q, k, v, decay, beta = self._rows(shape, 3)
        q[1, 0, 0] = float("nan")
        state = torch.stack([self._state(shape, seed) for seed in range(3)])
        rows = q, k, v, decay, beta, state, shape.rule
        self._expect(self._move_step(*rows), step(*rows))

    def _test_prompt(self, shape: DeltaShape, dtype: torch.dtype) -> None:
        q, k, v, decay, beta = (x.transpose(0, 1) for x in self._rows(shape, _TOKENS))
        q, k, v = (x.to(dtype).float() for x in (q, k, v))
        rows = q, k, v, decay, beta, self._state(shape, 0), shape.rule
        self._expect(self._move_segment(dtype, *rows), segments(*rows), torch.finfo(dtype).eps)

    def _expect(
        self, answer: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor], eps: float = 2.0**-16
    ) -> None:
        """float32 sums in another order, or products of 16 bits."""
        for name, one, right in zip(("what is read", "the state"), answer, truth, strict=True):
            expect_close(name, one, right, eps, least=0.0)

    def _rows(self, shape: DeltaShape, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of so many tokens, as `step` has them."""
        generator = torch.Generator().manual_seed(_SEED)
        heads, decays = shape.value_heads, shape.decays // shape.value_heads

        def drawn(*size: int) -> Tensor:
            return torch.randn(tokens, heads, *size, generator=generator)

        q, k = (F.normalize(drawn(shape.key), dim=-1).to(self._device) for _ in "qk")
        v, decay, beta = drawn(shape.value), -F.softplus(drawn(decays)), drawn().sigmoid()
        return q, k, v.to(self._device), decay.to(self._device), beta.to(self._device)

    def _state(self, shape: DeltaShape, seed: int) -> Tensor:
        size = shape.value_heads, shape.key, shape.value
        return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(self._device) / 4


def _decays(decay_XYE: Tensor, rule: Rule) -> Tensor:
    return decay_XYE[..., 0] if rule == "head" else decay_XYE


def _size(shape: DeltaShape, dtype: torch.dtype) -> str:
    return f"{shape.value_heads} heads of {shape.key} x {shape.value} by {shape.rule}, {dtype}"
