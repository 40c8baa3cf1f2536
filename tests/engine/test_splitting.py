"""Over how many nodes a prompt is split: one where that is in time, else the fewest that are."""

from hypothesis import given
from hypothesis import strategies as st

from afserve.engine.kv.moving.prompt_place import PromptQueue, SplitPrompt, parts_of

queues = st.lists(
    st.builds(PromptQueue, st.floats(0, 1e5), st.sampled_from((0.0, 500.0, 4000.0))), min_size=1, max_size=9
)
prompts_of = st.builds(
    SplitPrompt, st.integers(1, 200_000), st.integers(1, 8192), st.integers(1, 80), st.floats(0, 2)
)
IDLE = PromptQueue(0.0, 1000.0)


def test_example():
    """8,000 tokens at 1,000 a second, in chunks of 500, of a model of 50 layers: a chunk is 10 ms behind the last."""
    prompt = SplitPrompt(8000, 500, 50, 0.0)
    assert prompt.seconds([IDLE], 1000.0) == 8.0
    assert prompt.seconds([IDLE] * 4, 1000.0) == 2.0 + 0.03
    assert [parts_of(prompt, within, [IDLE] * 4) for within in (8.0, 4.1, 3.0, 2.5, 2.0, -1.0)] == [
        1, 2, 3, 4, 1, 1,
    ]  # fmt: skip
    busy = PromptQueue(3000.0, 1000.0)
    assert parts_of(prompt, 4.1, [IDLE, busy]) == 1, "all wait for the last one"
    assert parts_of(prompt, 4.1, [PromptQueue(0.0, 0.0)] * 2) == 1, "nobody has said how fast it is"
    assert parts_of(prompt, 4.1, [PromptQueue(0.0, 0.0), IDLE]) == 2


@given(prompts_of, st.floats(-10, 1000), queues)
def test_it_is_the_fewest_nodes_that_are_in_time_and_one_otherwise(prompt, within, nodes):
    parts = parts_of(prompt, within, nodes)
    rate = min((node.rate for node in nodes if node.rate), default=0.0)
    if not rate:
        assert parts == 1
        return
    in_time = [k for k in range(1, len(nodes) + 1) if prompt.seconds(nodes[:k], rate) <= within]
    assert parts == min(in_time, default=1)


@given(prompts_of, st.integers(1, 8))
def test_more_idle_nodes_are_sooner_unless_layers_or_blocks_take_longer(prompt, nodes):
    free = SplitPrompt(prompt.tokens, prompt.chunk, 10**9, 0.0)
    one, more = (free.seconds([IDLE] * count, 1000.0) for count in (nodes, nodes + 1))
    assert more <= one + 1e-6
    assert prompt.seconds([IDLE] * nodes, 1000.0) >= prompt.tokens / 1000.0 / nodes
