"""Rows that are near: whatever was fetched, written and forgotten, what attention reads is what the cache has."""

import random
from collections.abc import Callable

import pytest
import torch

from afserve.errors import DoesNotFitError
from afserve.kernels.devices import pages
from afserve.kernels.devices.host import HostDevice
from afserve.kernels.indexer import NearRows
from afserve.kernels.native_caches import NativeNearRows
from afserve.kernels.paged import PagedBatch
from tests.kernels.conftest import SETS, native

SLOTS, WIDTH = 60, 5


def rows_of(chosen: list[list[int]], widest: int) -> PagedBatch:
    """What each token attends, as `chosen_batch` says it; behind a token's last row stands what means nothing."""
    table = torch.tensor([one + [7] * (widest - len(one)) for one in chosen], dtype=torch.int32)
    count, last = (
        torch.tensor([len(one) for one in chosen], dtype=torch.int32),
        torch.zeros(len(chosen)).long(),
    )
    start = torch.arange(len(chosen) + 1, dtype=torch.int32)
    starts, counts = tuple(start.tolist()), tuple(count.tolist())
    return PagedBatch(last, last, start, count, table, 1, widest, starts, counts)


def played(near: NearRows, far_NBC: torch.Tensor, seed: int, device: torch.device) -> None:
    draw, far_SC = random.Random(seed), far_NBC.flatten(0, 1)
    asked, known = 0, set[int]()
    for turn in range(40):
        written = torch.tensor(draw.sample(range(SLOTS), 3))
        far_SC[written] = float(turn)
        near.forget_rows(torch.cat([written, torch.tensor([-1])]).to(device))
        known -= {*written.tolist()}
        most = draw.choice((3, 8))
        chosen = [
            sorted(draw.sample(range(SLOTS), draw.randint(1, most))) for _ in range(draw.choice((1, 2, 9)))
        ]
        whole = rows_of(chosen, most)
        tensors = ("position_T", "kv_slot_T", "query_start_S1", "context_S", "block_table_SB")
        for name in tensors:
            object.__setattr__(whole, name, getattr(whole, name).to(device))
        parts = list(near.parts_of(whole))
        assert sum(part.tokens for _, part in parts) == len(chosen)
        for here, part in parts:
            wanted, before = chosen[here], near.counts_4.tolist()
            place_TK = near.fetch_rows(part)
            for token, slots in enumerate(wanted):
                assert near.row_RC[place_TK[token, : len(slots)].long()].equal(far_SC[slots].to(device))
            found, fetched = (
                now - then for now, then in zip(near.counts_4.tolist()[2:], before[2:], strict=True)
            )
            assert found + fetched == sum(map(len, wanted))
            assert fetched >= len({slot for slots in wanted for slot in slots} - known), (
                "nothing is known unfetched"
            )
            known |= {slot for slots in wanted for slot in slots}
            if len(parts) == 1:
                near.fetch_rows(part)
                assert near.counts_4[3] == before[3] + fetched, "what was just fetched is near"
        asked += len(parts)
    assert asked > 40 and near.counts_4[2] > 0


@pytest.mark.parametrize("count", [8, 19, 64])
@pytest.mark.parametrize("isa", [*SETS[:1], ""])
def test_rows_are_those_of_the_cache(isa: str, count: int) -> None:
    far, counts = torch.randn(12, 5, WIDTH), torch.zeros(4, dtype=torch.int64)
    near = (NativeNearRows if isa else NearRows)(far, count, counts)
    if isinstance(near, NativeNearRows):
        near.open_with(native(isa, 1)._backend._engine)  # type: ignore[attr-defined]
    played(near, far, count, torch.device("cpu"))


def test_memory_that_a_device_cannot_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(HostDevice):
        def pin_pages(self, memory_Y: torch.Tensor) -> Callable[[], None]:
            raise OSError(f"{memory_Y.numel():,} bytes of memory cannot be pinned: 2")

    monkeypatch.setattr(pages, "device_of", Full)
    with pytest.raises(
        DoesNotFitError, match=r"^--kv-near-rows: .* 1,200 bytes of memory cannot be pinned: 2; keep"
    ):
        pages.lent_to(torch.device("cpu"), (12, 5, WIDTH), torch.float32)


def test_the_library_refuses_what_it_could_not_fetch() -> None:
    near = NativeNearRows(torch.zeros(12, 5, WIDTH), 8, torch.zeros(4, dtype=torch.int64))
    near.open_with(native(SETS[0], 1)._backend._engine)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="near rows: 3 tokens of 3 rows, room for 8"):
        near.fetch_rows(rows_of([[1], [2], [3]], 3))
    with pytest.raises(ValueError, match="near rows: slot 60"):
        near.fetch_rows(rows_of([[60]], 3))
