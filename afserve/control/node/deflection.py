"""Whether a decode node computes a prompt itself instead of having it handed over: numbers in, a decision out.

Where two nodes and a transfer stand against one node, times decide; but a long prompt would hold up those who decode
here, so only short ones go straight. It knows no requests and no clock.
"""

from dataclasses import dataclass


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
