"""When KV is read from a tier and when it is computed, and what is said of it: scripted tiers, a fake clock."""

from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from afserve.cli.status import tier_lines
from afserve.clock import FakeClock
from afserve.comm.disk.ways import Measured, Way, chosen, save
from afserve.comm.kv.source import KvSource
from afserve.config import EngineConfig, EngineSettings, ModelSource
from afserve.config_texts import bytes_of
from afserve.control.wire.view_values import NodeView
from afserve.credentials import NOBODYS
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import spec_of
from afserve.engine.kv.blocks import BlockPool
from afserve.engine.kv.cache import Fingerprint
from afserve.engine.kv.moving.jobs import LEAST_SECONDS, UNKNOWN_SECONDS
from afserve.engine.kv.moving.moves import KvMoves
from afserve.engine.kv.moving.open import KvPlace, open_tiers
from afserve.engine.kv.moving.restoring import IN_LINE
from afserve.engine.kv.tiers import KvTiers, Restored
from afserve.engine.kv.told import ToldCache
from afserve.engine.scheduling.request import (
    AHEAD_PRIORITY,
    GenerationRequest,
    Purpose,
    SamplingParams,
    TokenEvent,
)
from afserve.engine.stats import AttentionStats, HostStats, KvStats, TierStats
from afserve.errors import ConfigError
from afserve.kernels.ops import Ops
from afserve.launch.plan.checkup_disk import disk
from afserve.member import attention_life
from afserve.metrics import render
from afserve.models.keeping import kept_as_stored
from afserve.server.metrics.nodes import counted, hits
from tests.engine.test_kv_moves import SOURCE, Exchange, Node

BLOCK, BYTES = 16, 1000


class Wire(Exchange):
    """As in the tests of moves; it says that it was closed."""

    def close(self):
        self.closed = True


class Tiers(KvTiers):
    busy = True

    def on_look(self):
        pass

    def __init__(self):
        self.there = [("disk", 10)]
        self.limits, self.most, self.cancelled, self.ended, self.turns = [], [], [], [], []
        self.room = 1000  # blocks

    def look(self, names):
        found, left = [], len(names)
        for tier, count in self.there:
            found.append((tier, min(left, count)))
            left -= found[-1][1]
        return [(tier, count) for tier, count in found if count]

    def has_room(self, names, blocks):
        return blocks <= self.room

    def restore(self, names, limit, most=None, *, awaited=True):
        self.limits.append(limit)
        self.most.append(most)
        return len(self.limits)

    def cancel(self, number):
        self.cancelled.append(number)

    def turn(self, seconds):
        self.turns.append(seconds)

    def stats(self):
        return TierStats(blocks=1)

    def close(self):
        self.closed = True

    def ends(self, number, received, seconds, asked=10, tier="disk"):
        self.ended.append(Restored(number, {tier: asked}, {tier: received} if received else {}, 0, seconds))


class Scene:
    def __init__(self, waiting=1024):
        self.tiers, self.node, self.exchange = Tiers(), Node(), Wire()
        self.said: list[str] = []
        self.clock = FakeClock(5.0)
        self.side = KvMoves(
            self.node,
            self.exchange,
            self.clock,
            BLOCK,
            BYTES,
            waiting=waiting,
            tiers=self.tiers,
            warn=self.said.append,
        )


@pytest.fixture
def scene():
    return Scene()


def request(handle, blocks=10):
    return GenerationRequest(handle, tuple(range(blocks * BLOCK + 1)))


def test_a_request_waits_for_its_blocks_and_goes_on_with_what_came(scene):
    assert scene.side.restore(request(1)) and scene.tiers.limits == [UNKNOWN_SECONDS]
    assert scene.side.turn() == []
    scene.tiers.ends(1, 10, 0.01)
    assert scene.side.turn() == [request(1)] and scene.side.turn() == [] and not scene.said
    assert scene.side.restore(request(2))
    scene.tiers.ends(2, 4, 0.01)
    assert scene.side.turn() == [request(2)]
    (line,) = scene.said
    assert line == "request 2: 4 of 10 blocks came from the disk in 10.0 ms; 96 tokens are computed again"


def test_where_there_is_no_room_they_stand_in_a_line(scene):
    """A line has an end, and who goes leaves it."""
    scene.tiers.room = 0
    for handle in (1, 2, 3, 4):
        assert scene.side.restore(request(handle))
    assert scene.side.turn() == [] and not scene.tiers.limits and scene.side.busy and scene.side.in_line == 4
    scene.side.cancel(2)
    scene.clock.advance(IN_LINE / 2)
    assert scene.side.restore(request(5)) and scene.side.in_line == 4
    scene.tiers.room = 10
    assert scene.side.turn() == [] and len(scene.tiers.limits) == 4 and scene.side.in_line == 0
    scene.tiers.ends(2, 10, 0.01)
    assert [one.handle for one in scene.side.turn()] == [3]
    scene.tiers.room = 0
    assert scene.side.restore(request(7))
    scene.clock.advance(IN_LINE - 0.01)
    assert scene.side.turn() == []
    scene.clock.advance(0.02)
    assert [one.handle for one in scene.side.turn()] == [7], "it is computed"
    assert scene.side.restore(request(8))
    scene.tiers.there = []
    scene.clock.advance(0.02)
    assert [one.handle for one in scene.side.turn()] == [8], "nothing is left to wait for"


def test_who_has_room_passes_those_who_have_none_yet(scene):
    """The most urgent first; what is computed ahead never stands in line."""
    scene.tiers.room = 5
    assert scene.side.restore(request(1)) and not scene.tiers.limits
    assert scene.side.restore(request(2, 5)) and len(scene.tiers.limits) == 1, "it has room at once"
    assert not scene.side.restore(replace(request(3), priority=AHEAD_PRIORITY)) and scene.side.in_line == 1
    scene.tiers.room = 3
    assert scene.side.restore(replace(request(4, 8), priority=1)) and scene.side.restore(request(5, 8))
    scene.tiers.room = 8
    scene.clock.advance(0.02)
    assert scene.side.turn() == [] and scene.side.in_line == 1, "who stands first has no room yet"
    scene.tiers.ends(2, 8, 0.01)
    assert [one.handle for one in scene.side.turn()] == [5], "of those that have, the urgent one was first"


def test_what_is_not_there_is_computed(scene):
    scene.tiers.there = [("disk", 0)]
    assert not scene.side.restore(request(1)) and not scene.tiers.limits
    scene.tiers.there, scene.tiers.restore = (
        [("disk", 3)],
        lambda names, limit, most: None,
    )  # no memory for it
    assert not scene.side.restore(request(1))


def test_it_is_read_where_that_is_faster_and_a_slow_disk_gets_another_chance(scene):
    scene.node.prefill_rate = 16_000.0  # 160 tokens in 10 ms
    assert scene.side.restore(request(1)) and scene.tiers.limits == [LEAST_SECONDS]
    scene.tiers.ends(1, 10, 0.02)  # 20 ms
    scene.side.turn()
    tries = next(n for n in range(50) if scene.side.restore(request(2)))
    assert 0 < tries < 5
    scene.node.prefill_rate = 16.0
    assert scene.side.restore(request(3)) and scene.tiers.limits[-1] == 10.0


def test_a_cancelled_request_waits_no_more(scene):
    scene.side.restore(request(1))
    scene.side.cancel(1)
    assert scene.tiers.cancelled == [1]
    scene.tiers.ends(1, 10, 0.1)
    assert scene.side.turn() == []


def test_requests_that_begin_alike_wait_for_one_restoration(scene):
    scene.tiers.restore = lambda names, limit, most: 7
    for handle in (1, 2, 3):
        assert scene.side.restore(request(handle))
    scene.side.cancel(2)
    assert not scene.tiers.cancelled
    scene.tiers.there = [("disk", 0)]
    scene.tiers.ends(7, 10, 0.1)
    assert scene.side.turn() == [request(1), request(3)]
    scene.tiers.there = [("disk", 10)]
    for handle in (4, 5):
        assert scene.side.restore(request(handle))
    scene.tiers.ends(7, 10, 0.1)
    assert scene.side.turn() == [request(4)]  # the other one waits for what comes behind that
    scene.side.cancel(5)
    assert scene.tiers.cancelled == [7] and not scene.side._restores._jobs


def test_what_another_node_did_not_send_may_be_on_the_disk(scene):
    assert scene.side.pull(request(1), SOURCE) and scene.side.turn() == []
    assert [pull[3] for pull in scene.exchange.pulls] == [77] and not scene.tiers.limits
    scene.exchange.ends(1, 4, 0.1, "it broke")
    assert scene.side.turn() == [] and len(scene.tiers.limits) == 1
    scene.tiers.ends(1, 10, 0.1)
    assert scene.side.turn() == [replace(request(1), from_peer=4 * BLOCK)]


def test_a_busy_node_gives_the_disk_a_tenth_of_its_time(scene):
    scene.side.turn()
    scene.node.busy = True
    scene.clock.advance(0.05)
    scene.side.turn()
    scene.clock.advance(5.0)
    scene.side.turn()
    assert scene.tiers.turns == [0.02, pytest.approx(0.005), 0.01]


def test_it_says_what_tiers_have_and_ends_them(scene):
    assert scene.side.stats() == KvStats() and scene.side.tiers() == TierStats(blocks=1)
    scene.side.close()
    assert scene.exchange.closed and scene.tiers.closed


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="--kv-ssd: blocks are found as prefixes are"):
        EngineSettings(kv_ssd="/somewhere", prefix_caching=False)
    with pytest.raises(
        ConfigError, match="--kv-ssd-size: '9 apples' is not a size such as 100GiB"
    ) as refused:
        EngineSettings(kv_ssd="/somewhere", kv_ssd_size="9 apples")
    assert refused.value.param == "kv_ssd_size"
    with pytest.raises(ConfigError, match=r"--kv-ssd-size: '3KiB' is outside \[1MiB, 1024TiB\]"):
        EngineSettings(kv_ssd="/somewhere", kv_ssd_size="3KiB")
    sizes = ("100GiB", "1.5 MB", "2mib")
    assert [bytes_of("size", text) for text in sizes] == [100 << 30, 1_500_000, 2 << 20]


def test_host_memory_is_a_size_and_blocks_in_it_are_found_as_prefixes():
    assert EngineSettings().kv_host_bytes == 0 and EngineSettings(kv_host="7GiB").kv_host_bytes == 7 << 30
    with pytest.raises(ConfigError, match="--kv-host: '7 apples' is not a size such as 100GiB") as refused:
        EngineSettings(kv_host="7 apples")
    assert refused.value.param == "kv_host"
    with pytest.raises(ConfigError, match="--kv-host: blocks are found as prefixes are"):
        EngineSettings(kv_host="7GiB", prefix_caching=False)


def test_each_tier_has_a_rate_and_so_much_is_read_as_pays(scene):
    """Host memory takes 1 ms for its ten blocks, the disk 100 ms for as many; 160 tokens are computed in 20 ms."""
    scene.node.prefill_rate = 8_000.0
    for number, (tier, seconds) in enumerate((("host", 0.001), ("disk", 0.1)), 1):
        scene.tiers.there = [(tier, 10)]
        assert scene.side.restore(request(number))
        scene.tiers.ends(number, 10, seconds, tier=tier)
        assert scene.side.turn() == [request(number)]
    scene.tiers.there = [("host", 10), ("disk", 10)]
    assert scene.side.restore(request(3, blocks=20)) and scene.tiers.most == [10, 10, 10]
    tries = next(
        n for n in range(4, 50) if scene.side.restore(request(n, blocks=20)) and scene.tiers.most[-1] == 20
    )
    assert tries < 12, "a disk that was too slow gets another chance"
    scene.tiers.ended.append(Restored(4, {"host": 10, "disk": 10}, {"host": 10, "disk": 4}, 0, 0.5))
    scene.side.turn()
    assert scene.said == [
        "request 4: 14 of 20 blocks came from host memory and the disk in 500.0 ms; 96 tokens are computed again"
    ]
    assert scene.side.restore(request(60, blocks=20)) and scene.tiers.most[-1] == 10


def test_doctor_leaves_the_fastest_way_in_the_folder(tmp_path, monkeypatch):
    slow, fast = Measured(Way(False, 1), 1e9), Measured(Way(True, 4), 2.5e9, 0.2e-9)
    monkeypatch.setattr("afserve.comm.disk.ways.measure", lambda folder, ways, tell: [slow, fast])
    monkeypatch.setattr("afserve.comm.disk.deepspeed_library.libraries", lambda: None)
    monkeypatch.setattr("afserve.comm.disk.deepspeed_library.lacking", lambda: "pip install it")
    first, *rest = disk(tmp_path, print)
    assert first.advice == "pip install it" and first.level == "note"
    found = [finding.found for finding in rest]
    assert found[0] == " 2.50 GB/s by 4 threads, past the page cache, 0.20 s of a core for each GB"
    assert "1.00 GB/s by 1 thread" in found[1]
    assert found[2].startswith(f"--kv-ssd {tmp_path} is read by 4 threads") and chosen(tmp_path) == fast.way


def test_metrics_and_status_say_where_prompts_were_found():
    with_disk = AttentionStats(
        prefix_hits=100, tiers=TierStats(5, 90, 64, 2_500_000, 1000, restores=2, overwritten=3, damaged=1)
    )

    def drawn(*found):
        return render(
            counted(
                [
                    NodeView(f"attention-{i}", "attention", "ready", 1, 0.0, 0, stats)
                    for i, stats in enumerate(found)
                ]
            )
        )

    text = drawn(with_disk, AttentionStats(prefix_hits=7))
    assert 'afserve_kv_hit_tokens_total{node="attention-0",tier="memory"} 36' in text
    assert 'afserve_kv_hit_tokens_total{node="attention-0",tier="disk"} 64' in text
    assert 'afserve_kv_disk_dropped_blocks_total{node="attention-0",reason="overwritten"} 3' in text
    assert not any(
        name in drawn(AttentionStats(prefix_hits=7)) for name in ("kv_disk", "kv_host", "kv_restores")
    )
    host = HostStats(3, 8, hit_tokens=32, bytes_read=2000, bytes_written=5000, left=4, damaged=1)
    with_host = AttentionStats(prefix_hits=100, tiers=TierStats(hit_tokens=8, restores=2, host=host))
    text = drawn(with_host, with_disk)
    for tier, tokens in (("memory", 60), ("host", 32), ("disk", 8), ("peer", 0)):
        assert f'afserve_kv_hit_tokens_total{{node="attention-0",tier="{tier}"}} {tokens}\n' in text
    assert 'afserve_kv_host_bytes_total{node="attention-0",way="read"} 2000' in text
    assert 'afserve_kv_host_dropped_blocks_total{node="attention-0",reason="left"} 4' in text
    assert 'afserve_kv_host_capacity_blocks{node="attention-0"} 8' in text
    assert text.count('afserve_kv_restores_total{node="attention-') == 2
    assert 'afserve_kv_host_blocks{node="attention-1"}' not in text

    def answer(*found):
        views = [NodeView("attention-0", "attention", "ready", 1, 0.0, 0, stats) for stats in found]
        return {"nodes": [asdict(view) for view in views], "kv_hits": hits(views)}

    assert tier_lines(answer(AttentionStats())) == tier_lines(answer()) == []
    found, line = tier_lines(answer(with_host))
    assert found == "prompt tokens whose KV was found: 60 in the cache, 32 in host memory, 8 on disk"
    assert line == (
        "KV in host memory: 3 of 8 blocks, 0.0 MB read, 0.0 MB written, 4 made room for others, 1 damaged"
    )
    found, line = tier_lines(answer(with_disk, AttentionStats(prefix_hits=7, kv=KvStats(peer_tokens=5))))
    assert found == "prompt tokens whose KV was found: 38 in the cache, 5 at other nodes, 64 on disk"
    assert line == (
        "KV on disk: 5 of 90 blocks, 2.5 MB read, 0.0 MB written, blocks dropped: 1 damaged, 3 overwritten"
    )


def opened(stored=(), dense=False, **settings):
    """(the tiers below, if any, what was said: (text, whether it warns))"""
    said = []
    kv = SimpleNamespace(
        fingerprint=Fingerprint("m", "bfloat16", "v1", BLOCK), block_bytes=BYTES, experts_as_stored=stored,
        dense_in_fp8=dense,
    )  # fmt: skip
    blocks = SimpleNamespace(part_bytes=0, block_bytes=BYTES, memory=lambda blocks: None)
    place = KvPlace(
        3,
        "",
        NOBODYS,
        EngineConfig(max_model_len=64, kv_blocks=8, **settings),
        ModelSource("", "m", load_format="dummy"),
        tell=lambda line: said.append((line, False)),
        warn=lambda line: said.append((line, True)),
        wake=lambda: None,
        sleep_in=lambda wires: None,
    )
    node = SimpleNamespace(kv=kv, blocks=blocks, told=ToldCache(BlockPool(8, BLOCK)))
    return open_tiers(cast(AttentionNode[Any], node), place), said


def test_a_folder_that_cannot_be_used_is_said_and_the_node_serves_without(tmp_path):
    kv, said = opened()
    assert kv is None and not said
    (tmp_path / "file").write_text("")
    kv, said = opened(kv_ssd=str(tmp_path / "file"))
    assert kv is None
    ((line, warns),) = said
    assert warns and line.startswith(f"KV is not kept on disk: --kv-ssd {tmp_path}/file: [Errno ")
    assert line.endswith("give a folder that it may write to")


def test_host_memory_that_cannot_be_had_is_said_and_the_node_serves_without():
    kv, said = opened(kv_host="1000TiB")
    ((line, warns),) = said
    assert kv is None and warns
    assert line.startswith("KV is not kept in host memory: --kv-host 1000TiB: 1,099,")
    assert line.endswith("; ask for another size")
    kv, said = opened(kv_host="2MiB")
    assert said == [("KV in host memory: at most 2,097 blocks of 16 tokens (1,000 bytes)", False)]
    assert [tier.name for tier in kv._tiers] == ["host"]


def test_host_memory_comes_before_the_disk(tmp_path):
    kv, said = opened(kv_host="2MiB", kv_ssd=str(tmp_path), kv_ssd_size="2MiB")
    assert len(said) == 2
    host, disk = kv._tiers
    assert (host.name, disk.name) == ("host", "disk") and host._below is disk
    disk._disk.close()


def test_files_say_in_what_weights_were_kept(tmp_path):
    """KV of a run whose kernels left experts or linear maps in FP8 is not found by one that widened them."""
    folders = []
    for stored, dense, dtype in [
        ((), False, "auto"),
        (("fp8",), False, "auto"),
        (("fp8",), True, "auto"),
        (("fp8",), False, "int8"),
        ((), False, "int8"),
        (("fp8",), False, "auto"),
    ]:
        kv, _ = opened(stored, dense, kv_ssd=str(tmp_path), kv_ssd_size="2MiB", expert_dtype=dtype)
        folders.append(kv._tiers[0]._disk.store.folder)
        kv._tiers[0]._disk.close()
    rounded, kept, both, int8, also_int8, again = folders
    assert len({rounded, kept, both, int8}) == 4 and again == kept and also_int8 == int8


def test_what_kernels_leave_as_it_is_stored():
    """FP8 in blocks of 128 alone, where the kernels multiply it for rows of this dtype."""
    spec = replace(spec_of(ModelSource("configs/nano", "nano")), fp8_block=(128, 128))
    holds = SimpleNamespace(
        holds_fp8=lambda dtype: dtype is torch.bfloat16, holds_int4=lambda dtype: True, ggml=None
    )
    kept = partial(kept_as_stored, ops=cast(Ops, holds))
    assert kept(spec, dtype=torch.bfloat16) == ("fp8",)
    assert kept(spec, dtype=torch.float32) == kept(replace(spec, fp8_block=None), dtype=torch.bfloat16) == ()
    assert kept(replace(spec, fp8_block=(64, 64)), dtype=torch.bfloat16) == ()


def test_a_folder_is_read_as_it_was_measured(tmp_path):
    save(tmp_path, Measured(Way(direct=False, readers=1), 1e9))
    kv, said = opened(kv_ssd=str(tmp_path), kv_ssd_size="2MiB")
    ((line, warns),) = said
    assert not warns and "/3 has 0 of at most 2,048 blocks of 16 tokens (1,000 bytes), read by 1 thr" in line
    names = [thread.name for thread in kv._tiers[0]._disk._threads]
    assert names == ["disk-read-0", "disk-check", "disk-write"]
    kv._tiers[0]._disk.close()


def test_a_prompt_too_short_for_any_disk_teaches_nothing(scene):
    assert scene.side.restore(request(1))
    scene.tiers.ends(1, 10, 0.1)  # 0.1 MB/s
    scene.side.turn()
    scene.node.prefill_rate = 1e6
    scene.tiers.there = [("disk", 1)]
    assert not any(scene.side.restore(request(handle)) for handle in range(2, 3000))
    scene.tiers.there, scene.node.prefill_rate = [("disk", 10)], 16_000.0  # 10 ms
    assert not scene.side.restore(request(3000)), "the disk takes 100 ms"


def test_a_disk_that_gives_nothing_is_not_asked_by_all_who_wait(scene):
    scene.node.prefill_rate = 16_000.0
    scene.tiers.restore = lambda names, limit, most: 7
    for handle in (1, 2, 3):
        assert scene.side.restore(request(handle))
    scene.tiers.ends(7, 0, LEAST_SECONDS)
    assert scene.side.turn() == [request(1), request(2), request(3)]
    assert not scene.side.restore(request(4)), "it is known to be slow now"


def test_as_many_wait_as_the_scheduler_would_take():
    scene = Scene(waiting=2)
    assert [scene.side.restore(request(handle)) for handle in (1, 2, 3)] == [True, True, False]


def test_a_prompt_that_is_computed_for_another_node_is_looked_for_too(scene):
    went_on: list[TokenEvent] = []
    scene.side._prefilling.go_on = went_on.append
    theirs = replace(request(-1), purpose=Purpose.PROMPT, params=SamplingParams(max_tokens=1))
    assert scene.side.restore(theirs) and scene.side.restore(request(1))
    scene.tiers.ends(1, 10, 0.1)
    scene.tiers.ends(2, 10, 0.1)
    assert scene.side.turn() == [request(1)], "the gateway knows no other"
    assert went_on == [theirs]


def test_a_prefill_node_is_asked_for_what_the_disk_has_not(scene):
    scene.node.most_room = 10
    prefills = KvSource(attention_life(1, 0), 7, "unix:there", prefills=True)
    assert scene.side.pull(request(1), prefills) and scene.side.turn() == [] and not scene.exchange.pulls
    scene.tiers.ends(1, 6, 0.1)
    assert scene.side.turn() == [] and scene.side.turn() == [] and len(scene.exchange.pulls) == 1
    scene.tiers.there = []
    scene.exchange.ends(1, 10, 0.1)
    assert [one.handle for one in scene.side.turn()] == [1]


def test_files_of_other_experts_are_not_read(tmp_path):
    """They outlive the run: how the experts below a layer are rounded is part of what its keys are."""
    folders = set()
    for settings in ({}, {"expert_dtype": "int4"}, {"dense_dtype": "int4"}, {"wire_dtype": "fp8"}):
        kv, said = opened(kv_ssd=str(tmp_path), **settings)
        folders.add(said[0][0].partition(" has ")[0].rpartition("/")[0])
        kv._tiers[0]._disk.close()
    assert len(folders) == 4
