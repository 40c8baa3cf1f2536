"""How long a member may say nothing before it counts as lost: longer where the silence may be the host's, not its own.

Values in, a number of seconds out. A watcher that is late itself, a host on which everything waits for a processor,
several that are silent at once: each makes it likelier that who is silent lives. To lose the last one of a role can
only lose, and one that has been silent and came back is given more time than it took.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Of the watcher's host: `late` is by how many seconds its own last look came too late, `pressure` the share of the
    last seconds in which something waited for a processor. None where the kernel does not say."""

    late: float = 0.0
    pressure: float | None = None


@dataclass(frozen=True, slots=True)
class SilenceRules:
    """Seconds but for `times`, `apart`, `busy` and `gap`.

    With a pressure above `busy` limits grow, up to `times` as long when something waits all of the time. A watcher that
    was late adds `lateness` times as much. Where at least the share `apart` of all is silent at once, all are given
    `together` times as long; whoever came back lately, `gap` times as long as that took; the last of its role at least
    `last`. Nobody is given more than `most`, unless the limit itself is longer. `memory`: how long all this counts.
    """

    busy: float = 0.6
    times: float = 8.0
    lateness: float = 10.0
    apart: float = 0.5
    together: float = 3.0
    gap: float = 3.0
    last: float = 10.0
    most: float = 60.0
    memory: float = 30.0


@dataclass(frozen=True, slots=True)
class SilenceSigns:
    """What speaks for somebody who says nothing. `silent` of `watched` others say nothing either; `gap` is the longest
    silence that it came back from lately; `last`: no other of its role serves."""

    late: float = 0.0
    pressure: float | None = None
    silent: int = 0
    watched: int = 0
    gap: float = 0.0
    last: bool = False


def stretch(late: float, pressure: float | None, rules: SilenceRules) -> float:
    """How many times as long everything may take on a host that is so busy; 1 on a quiet one, `times` at most."""
    share = 0.0 if pressure is None else min(1.0, max(0.0, (pressure - rules.busy) / (1.0 - rules.busy)))
    return min(rules.times, 1.0 + (rules.times - 1.0) * share + rules.lateness * max(0.0, late))


def patience(limit: float, signs: SilenceSigns, rules: SilenceRules) -> float:
    """Seconds after which whoever may be silent for `limit` on a quiet host is lost. Never less than `limit`."""
    seconds = limit * stretch(0.0, signs.pressure, rules) + rules.lateness * max(0.0, signs.late)
    # One that is silent alone is itself in the count: of two, both have to be.
    if signs.silent and signs.silent + 1 >= rules.apart * (signs.watched + 1):
        seconds *= rules.together
    seconds = max(seconds, rules.gap * signs.gap)
    if signs.last:
        seconds = max(seconds, rules.last)
    return max(limit, min(seconds, rules.most))
