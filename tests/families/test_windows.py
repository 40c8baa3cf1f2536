"""gpt-oss with the blocks that `afserve up` gives the layers with windows: the tokens of a cache that keeps everything,
in steps of one native call, with prefixes found again and sequences thrown out of a small cache."""

import pytest

from afserve.config import ModelSource
from afserve.engine.build import colocated, spec_of
from afserve.engine.kv.groups import groups_of
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.kernels.native_stack import NativeDecoder
from tests.engine.driving import collect, config, drive, prompts

ASKED = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
LENGTHS = (5, 41, 90, 120)


@pytest.mark.slow
def test_layers_with_windows_have_blocks_of_their_own(checkpoint, monkeypatch):
    source = ModelSource(str(checkpoint("gptoss")), "gptoss")
    asked = [GenerationRequest(i, prompt, ASKED) for i, prompt in enumerate(prompts(LENGTHS))]
    wanted = collect(drive(colocated(source, config(max_batch_tokens=32, prefill_tokens=32)), asked))
    few = config(max_batch_tokens=32, prefill_tokens=32, kv_blocks=40, window_blocks=24)
    spec = spec_of(source)
    full, windowed = groups_of(spec, spec.layers, few)
    assert sorted((*full.layers, *windowed.layers)) == list(range(spec.layers))
    assert windowed.layers == spec.windowed_layers and windowed.blocks == 24
    node, calls, decode = colocated(source, few), [], NativeDecoder.decode_tokens

    def noted(decoder, token_S, groups, *rest):
        calls.append(len(groups))
        return decode(decoder, token_S, groups, *rest)

    monkeypatch.setattr(NativeDecoder, "decode_tokens", noted)
    assert collect(drive(node, asked)) == wanted
    assert set(calls) == {2}, "no step was one call over both tables"
    assert node.stats().preemptions > 0
    again = [GenerationRequest(9 + one.handle, one.prompt_ids, ASKED) for one in asked]
    events = drive(node, again)
    for index, tokens in enumerate(wanted):
        assert [t for e in events if e.handle == 9 + index for t in e.token_ids] == tokens
    assert node.stats().prefix_hits > 0
