"""Quantised checkpoints of every family: the tokens of a plain checkpoint with the same values."""

from dataclasses import replace

import pytest

from afserve.engine.build import colocated
from tests.by_day import halves
from tests.engine.driving import GREEDY, collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.families.tiny import TINY
from tests.models.quantising import compressed_config, gptq, int8_channels, packed, quantised

GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False}
FORMS = {
    "gptq-act-order": (GPTQ, gptq(16, symmetric=False, ordered=True)),
    "w4a16": (compressed_config("pack-quantized", **GROUPS), packed()),
    "w8a8": (compressed_config("int-quantized", num_bits=8, strategy="channel"), int8_channels),
}
NO_WIDTH = {"glm4-no-shared"}  # its shared expert has matrices without a number


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", halves(sorted(TINY.keys() - NO_WIDTH)))
def test_tokens_are_those_of_the_same_values(name, form, checkpoint, tmp_path):
    few, plain = quantised(checkpoint(name), tmp_path, *FORMS[form])
    asked = requests(prompts((9, 20)), replace(GREEDY, max_tokens=4))
    wanted = collect(drive(colocated(plain, config()), asked))
    assert collect(drive(colocated(few, config()), asked)) == wanted
    cluster = LocalCluster.build(few, config(micro_batches=2), attention=1, experts=2)
    assert collect(cluster.run(asked)) == wanted
