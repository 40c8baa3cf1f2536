"""Where a prompt is computed: at the node that decodes it, at one prefill node, or at several together. Numbers in, a
number out; it knows no requests and no clock.

Straight at the decode node where that is sooner than elsewhere; but a long prompt would hold up those who decode there,
so only short ones are. At one prefill node where that is in time, for two together take more of the machines than one:
each waits for the other's layers, and all of them keep the whole prompt. Otherwise at the fewest that are in time; at
one again where not even all are, for it would hold up those who can still be in time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from afserve.comm.kv.split import MOST_PARTS


@dataclass(frozen=True, slots=True)
class PromptQueue:
    """A node's prompts: tokens that are queued, and tokens per second (0 where that was not measured yet)."""

    queued: float
    rate: float

    def seconds(self, tokens: int, rate: float) -> float:
        """Until so many more are computed, at `rate` where its own is not known."""
        return (self.queued + tokens) / (self.rate or rate)


def goes_straight(
    tokens: int, most: int, here: PromptQueue, there: PromptQueue | None, transfer: float
) -> bool:
    """`tokens` are not in the cache here; more than `most` never go straight. `there` is the prefill node as it said
    last, None while it has not; `transfer` is what it takes to hand them over, in seconds.

    A decode node that has not computed a prompt yet is taken to be as fast as the prefill node.
    """
    if tokens > most:
        return False
    if there is None or not there.rate:
        return False
    return here.seconds(tokens, there.rate) <= there.seconds(tokens, there.rate) + transfer


@dataclass(frozen=True, slots=True)
class SplitPrompt:
    """`tokens` that are not in the cache, in chunks of at most `chunk`; to move all their blocks to one node takes
    `transfer` seconds."""

    tokens: int
    chunk: int
    layers: int
    transfer: float

    def seconds(self, queues: Sequence[PromptQueue], rate: float) -> float:
        """Until these nodes together have handed it over; `rate` is that of nodes that have not said theirs.

        All wait for the one that is free last, and are as fast as the slowest. Each is a layer of a chunk behind the
        one before. With k nodes each gets (k - 1) / k of the blocks from the others; that this takes place while they
        compute is not counted upon.
        """
        nodes = len(queues)
        rates = [queue.rate or rate for queue in queues]
        waiting = max(queue.queued / each for queue, each in zip(queues, rates, strict=True))
        slowest = min(rates)
        chunk = min(self.chunk, self.tokens / nodes)
        behind = (nodes - 1) * chunk / slowest / self.layers
        exchanged = self.transfer * (nodes - 1) / nodes
        return waiting + self.tokens / slowest / nodes + behind + exchanged + self.transfer


def parts_of(prompt: SplitPrompt, within: float, queues: Sequence[PromptQueue]) -> int:
    """How many of these nodes, from the first one on, compute the prompt, so that it is there `within` seconds. A node
    that has not said how fast it is is taken to be as fast as the slowest that has."""
    rate = min((queue.rate for queue in queues if queue.rate), default=0.0)
    if not rate or prompt.seconds(queues[:1], rate) <= within:
        return 1
    for parts in range(2, min(len(queues), MOST_PARTS) + 1):
        if prompt.seconds(queues[:parts], rate) <= within:
            return parts
    return 1
