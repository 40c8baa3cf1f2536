"""DeepGEMM's grouped products of FP8 experts (`sgl-deep-gemm`), as `products.py` wants them.

`m_grouped_fp8_gemm_nt_contiguous` of sgl-deep-gemm 0.2 takes rows of e4m3 with a scale for 128 columns, weights with
one for 128 x 128, as our slots lie, and a slot for each place. On Hopper (9.0) scales are float32. On Blackwell (10.0)
they are powers of two, which it packs itself: checkpoints with others are our own kernels' there, for their weights
would have to be rounded again. Decoding takes the same call as prompts: a slot's tile has 128 places, whose products
take less time than its weights are read in. Nothing is read back from the device, so a step may be captured. It
compiles with CUDA's own compiler, which has to be there (`CUDA_HOME`).
"""

from types import ModuleType

import torch
from torch import Tensor

from afserve.errors import ConfigError
from afserve.kernels.devices.cuda import chip_of
from afserve.kernels.libraries.library import Library
from afserve.kernels.libraries.products import OP, GroupedProducts, expect_products, size_of
from afserve.kernels.packed import ExpertShape

HOPPER, BLACKWELL = 9, 10


class Adapter(Library):
    DISTRIBUTION, OLDEST = "sgl-deep-gemm", "0.2"

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        super().__init__(module, device)
        chip = chip_of(device)
        if chip.capability[0] not in (HOPPER, BLACKWELL):
            told = f"{chip.name} is compute capability {'.'.join(map(str, chip.capability))}"
            raise ConfigError(
                f"--gpu-kernels: deep-gemm is for 9.0 and 10.0, and {told}; leave it out", param="gpu_kernels"
            )
        self._powers = chip.capability[0] == BLACKWELL
        self._rows = int(module.get_mk_alignment_for_contiguous_layout())
        self._grouped = module.m_grouped_fp8_gemm_nt_contiguous

    def products(self, shape: ExpertShape) -> GroupedProducts | None:
        found = GroupedProducts(self.ops, size_of(shape), self._rows, self._powers, self._multiply)
        self.ops.test_op(OP, found.size, lambda: expect_products(found, shape, self._device))
        return found if self.ops.uses(OP, found.size) else None

    def _multiply(
        self, q_PK: Tensor, scale_PG: Tensor, weight_ENK: Tensor, scale_E: Tensor, slot_P: Tensor
    ) -> Tensor:
        out_PN = q_PK.new_empty((len(q_PK), weight_ENK.shape[1]), dtype=torch.bfloat16)
        self._grouped((q_PK, scale_PG), (weight_ENK, scale_E), out_PN, slot_P)
        return out_PN
