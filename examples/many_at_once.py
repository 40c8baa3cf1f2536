"""Sixteen prompts at once; a server that is full is asked again: python examples/many_at_once.py [URL]"""

import asyncio
import sys

from afserve import AsyncClient, SamplingParams

PARAMS = SamplingParams(max_tokens=8, temperature=0)


async def main() -> None:
    async with AsyncClient(*sys.argv[1:], retries=8) as client:
        replies = await asyncio.gather(*(client.complete(f"x{n} = ", PARAMS) for n in range(16)))
    for number, reply in enumerate(replies):
        print(number, repr(reply.text), reply.finish_reason)
    print(sum(reply.completion_tokens for reply in replies), "tokens")


asyncio.run(main())
