"""Which beginnings a node says that it has: those in its cache and below it, also after a restart, and no others."""

import logging

import pytest

from afserve.engine.kv.blocks import BlockPool
from afserve.engine.kv.kept_keys import KeptKeys
from afserve.engine.kv.prefix_keys import keys_of
from afserve.engine.kv.told import ToldCache

SIZE = 4


def names(count):
    return [bytes([index]) * 16 for index in range(1, count + 1)]


def filled(told, chain, tokens):
    keys: list[int] = []
    told.filled(chain, keys, tokens, 0, len(chain), "")
    return keys


class Below:
    """A tier that holds what a test says."""

    def __init__(self, *there):
        self.there = set(there)

    def __call__(self, asked):
        return [name in self.there for name in asked]


def test_what_left_the_cache_for_a_tier_is_still_said_until_it_leaves_that():
    told, chain, tokens = ToldCache(BlockPool(8, SIZE)), names(3), tuple(range(12))
    below = Below(*chain[:2])
    told.look_below(below, None)
    keys = filled(told, chain, tokens)
    assert keys == [key for key, _ in keys_of(tokens, SIZE)]
    told.prefixes.take()
    for name in reversed(chain):
        told.gone(name)
    assert told.prefixes.take() == ([], keys[2:]), "the third is in no tier"
    told.look()
    assert not told.prefixes.changed
    below.there.clear()
    told.look()
    assert sorted(told.prefixes.take()[1]) == sorted(keys[:2])


def test_after_a_restart_it_says_what_the_disk_still_has(tmp_path):
    path, chain, tokens = tmp_path / "keys", names(3), tuple(range(12))
    first = ToldCache(BlockPool(8, SIZE))
    first.look_below(Below(*chain), KeptKeys(path))
    keys = filled(first, chain, tokens)
    first.look()
    assert path.stat().st_mode & 0o077 == 0, "what users said can be told from it"
    with path.open("ab") as file:
        file.write(b"half of an entry")
    second = ToldCache(BlockPool(8, SIZE))
    second.look_below(Below(*chain[:2]), KeptKeys(path))
    assert second.prefixes.take() == (keys[:2], [])
    other = filled(second, names(4), tuple(range(50, 66)))[3:]
    second.look()
    third = ToldCache(BlockPool(8, SIZE))
    third.look_below(Below(*chain[:2], names(4)[3]), KeptKeys(path))
    assert set(third.prefixes.all()) >= {*other}


def test_the_file_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("afserve.engine.kv.kept_keys.MOST_HELD", 10)
    kept = KeptKeys(tmp_path / "keys")
    assert list(kept.read_all()) == []
    for number in range(500):
        kept.note(number.to_bytes(16, "big"), number)
        kept.write()
        assert (tmp_path / "keys").stat().st_size <= 20 * 24
    again = [key for _, key in KeptKeys(tmp_path / "keys").read_all()]
    assert again[-1] == 499 and len(again) <= 20


def test_a_folder_that_is_gone_costs_the_advice_alone(tmp_path, caplog):
    kept = KeptKeys(tmp_path / "gone" / "keys")
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            kept.note(bytes([number]) * 16, number)
            kept.write()
    assert caplog.text.count("do not know what is on this disk") == 1


@pytest.mark.parametrize("rounds", [400])
def test_all_beginnings_are_swept_in_turn(rounds):
    told, below = ToldCache(BlockPool(8, SIZE)), Below()
    told.look_below(below, None)
    chain = [number.to_bytes(16, "big") for number in range(rounds)]
    for number, name in enumerate(chain):
        below.there.add(name)
        told.prefixes.filled(name, number)
    below.there.clear()
    for _ in range(rounds // 32 + 1):
        told.look()
    assert len(told.prefixes) == 0
