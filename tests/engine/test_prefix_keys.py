"""Keys of beginnings: equal for equal tokens on both sides, told as they come and go, and never more than so many."""

from hypothesis import given
from hypothesis import strategies as st

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.kv.prefix_keys import HeldPrefixes, extend, keys_of, marks
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from tests.engine.driving import collect, config, drive, prompts, requests

SIZE = 8


@given(st.lists(st.integers(0, 3), max_size=900), st.integers(1, 9), st.sampled_from(("", "salt", "ü")))
def test_a_node_that_fills_blocks_and_a_gateway_that_has_the_prompt_make_the_same_keys(tokens, block, salt):
    whole = list(keys_of(tokens, block, salt))
    assert len(whole) == marks(len(tokens) // block)
    keys: list[int] = []
    grown: list[tuple[int, int]] = []
    for blocks in range(len(tokens) // block + 1):
        grown += extend(keys, tokens, blocks, block, salt)
    assert [(key, end * block) for end, key in grown] == whole and keys == [key for key, _ in whole]
    assert all(end % block == 0 for _, end in whole)
    if salt and whole:
        assert not {key for key, _ in whole} & {key for key, _ in keys_of(tokens, block)}


def test_beginnings_that_differ_have_other_keys():
    one, other = list(range(300)), [*range(40), 7, *range(41, 300)]
    same = [a == b for (a, _), (b, _) in zip(keys_of(one, 16), keys_of(other, 16), strict=True)]
    assert same == [True, True, *[False] * (len(same) - 2)]
    assert not list(keys_of([1 << 40] * 64, 16)), "no token ids"
    assert marks(16) == 16 and marks(31) == 16 and marks(32) == 17 and marks(256) == 31


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.booleans()), max_size=200), st.integers(1, 12)
)
def test_what_is_told_adds_up_to_what_is_held(events, most):
    held = HeldPrefixes(most)
    known: set[int] = set()
    for came, number, told in events:
        if came:
            held.filled(bytes([number]), 100 + number)
        else:
            held.gone(bytes([number]))
        assert len(held) <= most
        if told:
            added, removed = held.take()
            assert not set(added) & known and set(removed) <= known, "nothing is said twice"
            known = (known | set(added)) - set(removed)
            assert known == set(held.all()) and not held.changed


def held_in(node):
    pool = node.kv.pool
    return all(name in pool._block_of for name in node.told.prefixes._key_of)


def test_a_node_holds_what_it_computed_until_that_is_evicted(tiny_checkpoint):
    """Also of answers: the next turn of a conversation begins with them."""
    node = colocated(ModelSource(str(tiny_checkpoint("v3")), "v3"), config(kv_blocks=40, block_size=SIZE))
    short = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    asked = requests(prompts((50, 33)), short)
    said = collect(drive(node, asked))
    texts = [[*request.prompt_ids, *tokens] for request, tokens in zip(asked, said, strict=True)]
    for text in texts:
        keys = [key for key, end in keys_of(text, SIZE) if end <= len(text) - 1]
        assert set(keys) <= set(node.told.prefixes.all()) and len(keys) > 4
    node.told.prefixes.take()
    salted = GenerationRequest(7, tuple(texts[0]), short, cache_salt="own")
    drive(node, [salted])
    came, _ = node.told.prefixes.take()
    assert {key for key, _ in keys_of(texts[0], SIZE, "own")} <= set(came)
    fresh = requests(prompts((150, 160, 170, 140))[1:], short)
    for number, request in enumerate(fresh):
        drive(node, [GenerationRequest(20 + number, request.prompt_ids[::-1], short)])
        assert held_in(node)
    _, went = node.told.prefixes.take()
    assert set(went) & {key for key, _ in keys_of(texts[0], SIZE)}


def test_after_a_preemption_it_is_known_what_came_back(tiny_checkpoint):
    node = colocated(ModelSource(str(tiny_checkpoint("v3")), "v3"), config(kv_blocks=16, block_size=SIZE))
    asked = requests(prompts((40, 41, 42)), SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    drive(node, asked)
    assert node.stats().preemptions and held_in(node)
    kept = set(node.told.prefixes.all())
    for request in asked:
        names = node.usable_names(request)
        found = node.known(names)
        assert {key for key, end in keys_of(request.prompt_ids, SIZE) if end <= found * SIZE} <= kept
