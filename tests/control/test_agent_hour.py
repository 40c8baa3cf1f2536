"""Minutes of agents over the real cache, tiers, names and routing: what is found through restarts, and that words about
caching help where the cache is small. Every block that is found is checked to have its own bytes."""

from dataclasses import replace

import pytest

from bench.agent_hour import Scene, play

SMALL = Scene("small", 0.7, sessions=8, nodes=1, seconds=240.0, turns=8)


@pytest.mark.slow
def test_what_is_below_the_cache_is_found_through_restarts_and_words_about_caching_help():
    below, alone = play(SMALL), play(replace(SMALL, disk=False))
    silent = play(replace(SMALL, disk=False, hints=False, ahead=False))
    assert min(len(found.first) for found in (below, alone, silent)) > 40, "the sessions go on"
    assert below.share > 0.7 and below.share > alone.share
    assert alone.share >= silent.share and alone.ahead_tokens > 0 == silent.ahead_tokens
    assert play(replace(SMALL, disk=False)).first == alone.first, "the same scene gives the same"


@pytest.mark.slow
def test_nobody_finds_more_or_is_sooner_than_who_loses_nothing():
    tight = replace(SMALL, cache=0.5, hints=False, ahead=False)
    product, lossless = play(tight), play(replace(tight, oracle=True, lossless=True))
    future = play(replace(tight, oracle=True))
    assert min(lossless.share, future.share) >= product.share
    assert lossless.late(0.5) <= product.late(0.5)
    assert len(play(replace(tight, oracle=True, lossless=True, behind=True)).side) > 10
