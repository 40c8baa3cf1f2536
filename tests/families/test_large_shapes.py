"""Shapes that others cap: 512 experts of which a token takes 22, 896 and 16, in latents of 1,024 and 3,584."""

import pytest

from afserve.config import ModelSource
from tests.engine.driving import collect, config
from tests.engine.local_cluster import LocalCluster
from tests.families.test_against_transformers import asked
from tests.families.test_against_transformers import (
    test_logits_of_a_prompt_in_chunks as log_probabilities_are_those,
)
from tests.families.tiny import LARGE

SHAPES = [pytest.param(name, marks=pytest.mark.long if name.startswith("whole") else ()) for name in LARGE]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_many_experts(name, checkpoint, truth, continued):
    source = ModelSource(str(checkpoint(name)), name)
    log_probabilities_are_those(name, checkpoint, truth)
    cluster = LocalCluster.build(source, config(micro_batches=2, max_batch_tokens=12), attention=2, experts=3)
    assert collect(cluster.run(asked())) == continued(name)
