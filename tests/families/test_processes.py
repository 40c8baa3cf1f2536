"""Four of the families with the most of their own over real processes: the tokens of transformers, twice."""

import pytest

from afserve import LLM, SamplingParams
from tests.engine.driving import prompts
from tests.families.conftest import NEW

pytestmark = [pytest.mark.process, pytest.mark.long]


@pytest.mark.parametrize("name", ["gptoss", "llama4", "qwen3-next", "longcat-ngram"])
@pytest.mark.parametrize("topology", [(1, 1, 1), (2, 3, 2)], ids=["1x1", "2x3"])
def test_the_tokens_of_transformers(name, topology, checkpoint, continued):
    attention, experts, micro_batches = topology
    asked, greedy = [list(prompt) for prompt in prompts()], SamplingParams(max_tokens=NEW, temperature=0)
    with LLM(
        checkpoint(name), attention=attention, experts=experts, micro_batches=micro_batches, threads=1
    ) as llm:
        for _ in range(2):
            assert [list(one.token_ids) for one in llm.generate(asked, greedy)] == continued(name)


def test_states_are_handed_over(checkpoint, continued):
    """From a prefill node to a decode node, in blocks of 8 tokens; the second time their snapshots are found."""
    asked, greedy = [list(prompt) for prompt in prompts()], SamplingParams(max_tokens=NEW, temperature=0)
    settings = {"prefill": 1, "decode": 1, "experts": 1, "threads": 1, "block_size": 8, "straight_tokens": 0}
    with LLM(checkpoint("qwen3-next"), **settings) as llm:
        for found in (0, 16 + 32):
            answers = llm.generate(asked, greedy)
            assert [list(one.token_ids) for one in answers] == continued("qwen3-next")
            assert sum(one.cached_tokens for one in answers) == found
