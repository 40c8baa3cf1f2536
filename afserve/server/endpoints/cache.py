"""/v1/cache: what caches keep because a key asked for it, what that takes, and its end. A key sees its own; one of an
admin, and everybody where no key is asked for, sees all."""

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from afserve.control.backend import CacheKept
from afserve.control.wire.cache_values import KeptCache
from afserve.engine.kv.retained import Owned
from afserve.engine.stats import AttentionStats
from afserve.errors import RequestError, shown
from afserve.server.access.accounts import Account, account_of
from afserve.server.access.key_file import KeyRole
from afserve.server.access.keyring import ForbiddenError
from afserve.server.answers.hosted import Hosted
from afserve.server.bodies.prepared import Prepared
from afserve.server.endpoints.service import Service
from afserve.server.replies.refusal import json_response
from afserve.server.text.kinds import BodyKind

Row = dict[str, object]
_ALL = array("i")
_MEMORY, _HOST, _DISK = "memory", "host", "disk"


class CacheEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def show_kept(self, request: Request) -> Response:
        """What each key keeps at each node; who sees all also sees how full the tiers are."""
        models, owner = self._models(request), _owner(request)
        asked = (each.backend.kept_cache(owner, unpin=False, prompt=_ALL, salt="") for each in models)
        kept = await asyncio.gather(*asked)
        found = [(each.model_name, one) for each, one in zip(models, kept, strict=True)]
        rows = [row for model, kept in found for row in _kept_rows(model, kept)]
        said: Row = {"object": "cache", "kept": rows, "complete": _complete(found)}
        if owner is None:
            said["tiers"] = [row for each in models for row in await _tier_rows(each)]
        return json_response(said)

    async def delete_kept(self, request: Request) -> Response:
        """It stays in the cache as all else does, and is evicted next."""
        owner = _owner(request)
        found = await asyncio.gather(*(_unpin(each, owner) for each in self._models(request)))
        return json_response(_unpinned([one for each in found for one in each]))

    async def unpin_prompt(self, request: Request) -> Response:
        """The prompts of a body as /v1/cache/warm takes it stay no longer than others; what other prompts share with
        them does not either."""
        service = self._service
        with await service.bodies.read_body(request) as body:
            asked = await service.text.prepare(BodyKind.WARM, body.data)
            body.release_bytes()
        assert isinstance(asked, Prepared)
        model, owner, account = service.models.named(asked.model), _owner(request), self._whose(request)
        asked = model.as_generated(replace(asked, scheduling=account.scheduled(asked.scheduling)))
        salt = asked.scheduling.cache_salt
        return json_response(_unpinned(await _unpin(model, owner, asked.prompts, salt)))

    def _whose(self, request: Request) -> Account:
        """Whose prompt it is: it was kept under a salt of its key's. Raises RequestError where one for admin does not
        say, or names no key."""
        own, name, accounts = account_of(request.scope), _owner(request), self._service.accounts
        if own.key is None or own.key.role is not KeyRole.ADMIN or own.shares_prefixes:
            return own
        if name is None:
            raise RequestError.about(
                "key",
                "a prompt is kept for each key by itself; add ?key=NAME to say whose it is to let go, "
                f"?key={own.key.name} for your own",
            )
        if (key := accounts.ring.key_named(name)) is None:
            raise RequestError.about(
                "key", f"{shown(name)} is no key of this server; GET /v1/cache says who keeps what"
            )
        return accounts.account_for(key)

    def _models(self, request: Request) -> list[Hosted]:
        name = request.query_params.get("model")
        return list(self._service.models) if name is None else [self._service.models.named(name)]


async def _unpin(
    model: Hosted, owner: str | None, prompts: "Sequence[array[int]]" = (_ALL,), salt: str = ""
) -> list[tuple[str, CacheKept]]:
    """It is complete where nothing of it is computed any more either: that would be kept again."""
    for keeper in model.keeping_warm:
        for prompt in prompts:
            keeper.unpinned(owner, prompt, salt)
    left = all(await asyncio.gather(*(keeper.left() for keeper in model.keeping_warm)))
    asked = [model.backend.kept_cache(owner, unpin=True, prompt=prompt, salt=salt) for prompt in prompts]
    return [
        (model.model_name, replace(kept, complete=kept.complete and left))
        for kept in await asyncio.gather(*asked)
    ]


def _owner(request: Request) -> str | None:
    """Whose is asked about, None for all. Raises ForbiddenError for another key's."""
    key, asked = account_of(request.scope).key, request.query_params.get("key")
    if key is None or key.role is KeyRole.ADMIN:
        return asked
    if asked not in (None, key.name):
        raise ForbiddenError("key: another key's cache is seen by keys for admin alone; leave key out")
    return key.name


def _complete(found: list[tuple[str, CacheKept]]) -> bool:
    return all(kept.complete for _, kept in found)


def _unpinned(found: list[tuple[str, CacheKept]]) -> Row:
    told = [told for _, kept in found for _, told in kept.nodes]
    blocks, tokens = sum(one.unpinned for one in told), sum(one.unpinned * one.block_tokens for one in told)
    return {"object": "cache", "unpinned": {"blocks": blocks, "tokens": tokens}, "complete": _complete(found)}


def _kept_rows(model: str, kept: CacheKept) -> Iterator[Row]:
    for node, told in kept.nodes:
        for owned in told.owners:
            yield {"model": model, "node": node, "tier": _MEMORY, **_taken(owned, told)}


def _taken(owned: Owned, told: KeptCache) -> Row:
    """What it costs: a share of the node's cache, and bytes."""
    return {
        "key": owned.owner,
        "blocks": owned.blocks,
        "tokens": owned.blocks * told.block_tokens,
        "bytes": owned.blocks * told.block_bytes,
        "share": round(owned.blocks / max(1, told.blocks), 6),
        "seconds": round(owned.seconds, 3),
    }


async def _tier_rows(model: Hosted) -> list[Row]:
    """How full each node's tiers are below its cache, in blocks."""
    rows: list[Row] = []
    for node in (await model.backend.view()).nodes:
        if isinstance(node.stats, AttentionStats):
            for tier, told in ((_HOST, node.stats.tiers.host), (_DISK, node.stats.tiers)):
                where = {"model": model.model_name, "node": node.name, "tier": tier}
                if told.capacity:
                    rows.append({**where, "blocks": told.blocks, "capacity": told.capacity})
    return rows
