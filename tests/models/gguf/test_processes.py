"""A GGUF file over real processes: the tokens of the folder that it was made of, through `LLM`."""

import pytest

from afserve import LLM, SamplingParams
from tests.engine.driving import prompts
from tests.models.gguf.writing import convert

pytestmark = [pytest.mark.process, pytest.mark.long]


@pytest.mark.parametrize("name", ["qwen3", "v3", "gptoss"])
def test_the_tokens_of_the_folder(name, checkpoint, tmp_path):
    asked = [list(prompt) for prompt in prompts()]
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

    def tokens(model, **shape):
        with LLM(model, threads=1, **shape) as llm:
            return [list(one.token_ids) for one in llm.generate(asked, greedy)]

    file = str(convert(checkpoint(name), tmp_path / f"{name}.gguf"))
    wanted = tokens(str(checkpoint(name)), attention=1, experts=1)
    assert tokens(file, attention=1, experts=1) == wanted
    assert tokens(file, attention=2, experts=3, micro_batches=2) == wanted
    assert tokens(file, colocated=True) == wanted
