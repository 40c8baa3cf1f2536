"""Which stored responses are still there."""

from afserve.errors import NotFoundError


async def kept(store, owner, names):
    found = []
    for name in names:
        try:
            await store.get_response(owner, name)
        except NotFoundError:
            continue
        found.append(name)
    return found
