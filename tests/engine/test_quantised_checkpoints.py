"""Quantised checkpoints through whole clusters: the tokens of a plain checkpoint with the same values."""

import pytest

from afserve.engine.build import build_expert_bank, colocated, spec_of
from tests.engine.driving import BRIEF, collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.models.quantising import (
    awq,
    compressed_config,
    fp8_tensors,
    gptq,
    int8_channels,
    packed,
    quantised,
)

GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FORMS = {
    "w4a16": (compressed_config("pack-quantized", **GROUPS), packed()),
    "w4a16-zeros": (compressed_config("pack-quantized", **GROUPS, symmetric=False), packed(symmetric=False)),
    "w8a8": (compressed_config("int-quantized", num_bits=8, type="int", strategy="channel"), int8_channels),
    "fp8": (compressed_config("float-quantized", num_bits=8, type="float", strategy="tensor"), fp8_tensors),
    "gptq": (GPTQ, gptq()),
    "gptq-rows": ({**GPTQ, "group_size": -1}, gptq(-1)),
    "gptq-act-order": (
        {**GPTQ, "group_size": 16, "desc_act": True, "sym": False}, gptq(16, symmetric=False, ordered=True)
    ),
    "gptq-v2-8-bits": ({**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}, gptq(bits=8, shift=0)),
    "awq": (AWQ, awq()),
}  # fmt: skip
KEPT = ("w4a16", "gptq", "gptq-rows")


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_of_the_same_values(form, tiny_checkpoint, tmp_path):
    few, plain = quantised(tiny_checkpoint("qwen3"), tmp_path, *FORMS[form])
    asked = requests(prompts(), BRIEF)
    wanted = collect(drive(colocated(plain, config()), asked))
    assert collect(drive(colocated(few, config()), asked)) == wanted
    assert collect(LocalCluster.build(few, config(), attention=1, experts=2).run(asked)) == wanted
    spec, bank = spec_of(few), build_expert_bank(few, [(0, 0, 1)], 1)
    assert bank.rounding_error is None
    assert (bank.expert_bytes < spec.expert_parameters()) == (form in KEPT)
