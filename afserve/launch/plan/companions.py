"""Options that do nothing without another one: whoever gives one alone is told so.

Where nodes may be given a phase or scaled later, an option has its use then, and is none of these. It knows names only.
"""

from collections.abc import Mapping, Sequence

from afserve.errors import ConfigError
from afserve.launch.plan.wishes import UpFlags
from afserve.settings import flag_of

# what does nothing -> without this, a field of the group that is named
_COMPANIONS: Mapping[str, tuple[str, str]] = {
    "kv_ssd_size": ("engine", "kv_ssd"),
    "ray_attention": ("ray", "ray"),
    "ray_experts": ("ray", "ray"),
    "ray_placement": ("ray", "ray"),
    "ray_wait": ("ray", "ray"),
    "node_memory": ("run", "elsewhere"),
    "ssh_command": ("run", "ssh"),
}


def check_companions(asked: Sequence[UpFlags]) -> None:
    """Raises ConfigError naming what no model of the run makes use of."""
    given = frozenset().union(*(flags.given for flags in asked))
    for name, (group, other) in _COMPANIONS.items():
        if name in given and not any(_value(flags, group, other) for flags in asked):
            raise ConfigError(
                f"{flag_of(name)}: does nothing without {flag_of(other)}; add that, or drop it", param=name
            )


def _value(flags: UpFlags, group: str, name: str) -> object:
    owner = flags.wishes.engine if group == "engine" else getattr(flags, group)
    return getattr(owner, name)
