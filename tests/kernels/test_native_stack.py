"""All layers in one call against halves, FFNs and sums one by one: the same bits of everything."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.kernels.grouped import Groups
from afserve.kernels.latent import PreparedMla
from afserve.kernels.layer import PreparedGqa
from afserve.kernels.ops import Ops
from afserve.kernels.packed import PackedExperts, PackedLinear
from afserve.kernels.paged import PagedBatch
from afserve.kernels.stack import Stack, StackLayer
from tests.kernels import test_native_latent as latent
from tests.kernels import test_native_layer as grouped
from tests.kernels.conftest import SETS, native, on_their_own

HIDDEN, EXPERTS, INNER, BLOCK = grouped.HIDDEN, grouped.EXPERTS, 40, 16
BITS = {"whole": (False, None), "int8": (True, None), "int4": (False, Groups(32))}


@dataclass(frozen=True)
class Kind:
    """Of a layer. Without experts it is dense."""

    latent: bool
    experts: bool
    beside: bool  # a shared expert
    bits: str


KINDS = st.builds(Kind, st.booleans(), st.booleans(), st.booleans(), st.sampled_from(sorted(BITS)))


class Layers:
    """The same random layers for as many caches as are asked for."""

    def __init__(self, ops: Ops, dtype: torch.dtype, kinds: list[Kind]) -> None:
        self.ops, self.dtype, self.kinds = ops, dtype, kinds
        self.generator = torch.Generator().manual_seed(3)
        self.halves = [self._half(kind) for kind in kinds]
        self.ffns = [self._ffn(kind) if kind.beside or not kind.experts else None for kind in kinds]
        self.experts = [self._experts(kind) if kind.experts else None for kind in kinds]

    def _noise(self, *shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator) / shape[-1] ** 0.5).to(self.dtype)

    def _half(self, kind: Kind) -> PreparedMla | PreparedGqa:
        if kind.latent:
            return latent.layer(self.ops, self.dtype, True, kind.experts, *BITS[kind.bits])
        return grouped.layer(self.ops, self.dtype, True, kind.experts)

    def _ffn(self, kind: Kind) -> tuple[PackedLinear, PackedLinear]:
        shapes = (2 * INNER, HIDDEN), (HIDDEN, INNER)
        gate_up, down = (
            self.ops.pack_linear(self._noise(*shape), None, *BITS[kind.bits]) for shape in shapes
        )
        return gate_up, down

    def _experts(self, kind: Kind) -> PackedExperts:
        int8, int4 = BITS[kind.bits]
        made = self.ops.empty_experts(EXPERTS, HIDDEN, INNER, self.dtype, int8=int8, int4=int4)
        for slot in range(EXPERTS):
            self.ops.set_expert(made, slot, self._noise(2 * INNER, HIDDEN), self._noise(HIDDEN, INNER))
        return made

    def over(self, sequences: int) -> tuple[list[StackLayer], list[torch.Tensor]]:
        """Layers over a cache of their own, and its tensors."""
        layers, memory = [], []
        for half, ffn, experts in zip(self.halves, self.ffns, self.experts, strict=True):
            if isinstance(half, PreparedMla):
                memory.append(latent.cache(sequences, self.dtype))
                bound = self.ops.bind_mla(half, memory[-1])
            else:
                memory += grouped.caches(sequences, self.dtype)
                bound = self.ops.bind_gqa(half, *memory[-2:])
            layers.append(StackLayer(bound, ffn, experts))
        return layers, memory


def one_by_one(
    ops: Ops, layers: list[StackLayer], x_TH: torch.Tensor, batch: PagedBatch, bad_T: torch.Tensor
) -> list[torch.Tensor]:
    """What the engine does with experts in the same process; what each router chose."""
    chosen = []
    for number, layer in enumerate(layers):
        run = ops.mla_half if isinstance(layer.half.layer, latent.MlaLayer) else ops.gqa_half
        half = run(x_TH, layer.half, batch)
        local_TH = None if layer.ffn is None else ops.mlp(half.normed_TH, *layer.ffn)
        if layer.experts is None:
            ops.add_sums(x_TH, local_TH, bad_T, number)
            continue
        y_TH = torch.empty(x_TH.shape)
        ops.expert_ffn(half.normed_TH, half.expert_TK, half.weight_TK, layer.experts, y_TH)
        if local_TH is not None:
            x_TH += local_TH
        ops.add_sums(x_TH, y_TH, bad_T, number)
        chosen.append(half.expert_TK)
    return chosen


def bits(x: torch.Tensor) -> torch.Tensor:
    """A NaN is any NaN."""
    return x.nan_to_num(nan=-7.0) if x.dtype.is_floating_point else x


def made(ops: Ops, layers: list[StackLayer]) -> Stack:
    stack = ops.stack_layers(layers)
    assert stack is not None
    return stack


def check(ops: Ops, dtype: torch.dtype, kinds: list[Kind], contexts: list[int], poisoned: int = -1) -> None:
    tokens, layers, batch = len(contexts), Layers(ops, dtype, kinds), grouped.decode_batch(contexts)
    x_TH = latent.rows(tokens, dtype)
    if poisoned >= 0:
        x_TH[poisoned % tokens, 1] = float("inf")
    results = []
    for stacked in (True, False):
        over, memory = layers.over(tokens)
        x, bad = x_TH.clone(), torch.full((tokens,), -1, dtype=torch.int32)
        if stacked:
            chosen = list(ops.run_stack(made(ops, over), x, [ops.bind_batch(batch)], bad).expert_LTK)
        else:
            chosen = one_by_one(ops, over, x, batch, bad)
        assert len(chosen) == sum(kind.experts for kind in kinds)
        results.append([x, bad, *chosen, *memory])
    for mine, wanted in zip(*results, strict=True):
        assert torch.equal(bits(mine), bits(wanted))
    assert (poisoned >= 0) == bool((results[0][1] >= 0).any())


@pytest.mark.parametrize("isa", SETS)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kinds=st.lists(KINDS, min_size=1, max_size=4),
    contexts=st.lists(st.integers(1, 63), min_size=1, max_size=35),
    poisoned=st.integers(-20, 34),
    threads=st.sampled_from([1, 3]),
)
@settings(max_examples=25)
def test_any_layers_and_rows(isa, dtype, kinds, contexts, poisoned, threads):
    ops = native(isa, threads)
    with on_their_own(ops):
        check(ops, dtype, kinds, contexts, max(poisoned, -1))


def test_a_prompt_beside_decoding(ops: Ops) -> None:
    """Several rows of one sequence, as where all of a prompt's rows are read."""
    kinds = [
        Kind(True, False, False, "whole"),
        Kind(True, True, True, "int4"),
        Kind(False, True, False, "int8"),
    ]
    layers = Layers(ops, torch.bfloat16, kinds)
    x_TH, results = latent.rows(21, torch.bfloat16), []
    position = torch.cat((torch.arange(20), torch.tensor([33])))
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    slot = torch.cat((torch.arange(20), torch.tensor([4 * BLOCK + 33])))
    starts = torch.tensor([0, 20, 21], dtype=torch.int32)
    batch = PagedBatch(position, slot, starts, torch.tensor([20, 34], dtype=torch.int32), table, 20, 34)
    for stacked in (True, False):
        (over, memory), x = layers.over(2), x_TH.clone()
        bad = torch.full((21,), -1, dtype=torch.int32)
        if stacked:
            ops.run_stack(made(ops, over), x, [batch], bad)
        else:
            one_by_one(ops, over, x, batch, bad)
        results.append([x, *memory])
    for mine, wanted in zip(*results, strict=True):
        assert torch.equal(mine, wanted)


def test_what_is_no_stack(falling: Ops, truth: Ops) -> None:
    """Nothing is stacked that the library does not run from end to end; rows that do not fit are named."""
    bf16, kinds = torch.bfloat16, [Kind(False, True, True, "whole")]
    layers = Layers(falling, bf16, kinds).over(1)[0]
    assert truth.stack_layers(Layers(truth, bf16, kinds).over(1)[0]) is None
    wide = Layers(falling, torch.float32, kinds).over(1)[0]
    assert falling.stack_layers([*layers, *wide]) is None, "layers of two dtypes"
    odd = Layers(falling, torch.float16, kinds).over(1)[0]
    assert falling.stack_layers(odd) is None, "a dtype that the library does not know"
    one = layers[0]
    assert falling.stack_layers([StackLayer(one.half, one.ffn, odd[0].experts)]) is None
    assert falling.stack_layers([StackLayer(one.half, odd[0].ffn, one.experts)]) is None
    stack, batch = made(falling, layers), grouped.decode_batch([5])
    with pytest.raises(ValueError, match="x_TH: shape"):
        falling.run_stack(stack, torch.zeros(1, HIDDEN + 1, dtype=bf16), [batch])
    with pytest.raises(ValueError, match=r"x_TH: torch.float32 .* expected contiguous torch.bfloat16"):
        falling.run_stack(stack, torch.zeros(1, HIDDEN), [batch])
    with pytest.raises(ValueError, match="bad_T"):
        falling.run_stack(
            stack, torch.zeros(1, HIDDEN, dtype=bf16), [batch], torch.zeros(2, dtype=torch.int32)
        )
    assert falling.stack_layers([]) is None
