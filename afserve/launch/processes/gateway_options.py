"""What a gateway process is told by whoever starts it. A value of its own: only gateways import the HTTP server."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from afserve.server.http.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """What a gateway is told by whoever starts it, beside what the controller assigns. `created` in Unix seconds."""

    name: str
    tokenizer: str
    settings: ServerSettings
    created: int
    aliases: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        plain = asdict(self)
        plain["settings"]["hosts"] = sorted(self.settings.hosts)
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "GatewayOptions":
        settings = dict(plain["settings"])
        for name, value in settings.items():
            if isinstance(value, list):  # JSON has no tuples
                settings[name] = tuple(value)
        settings["hosts"] = frozenset(settings["hosts"])
        return cls(
            plain["name"],
            plain["tokenizer"],
            ServerSettings(**settings),
            plain["created"],
            tuple(plain["aliases"]),
        )


def options_of(names: Sequence[str], tokenizer: str, settings: ServerSettings) -> GatewayOptions:
    """`names` of the model, the one that answers have first."""
    return GatewayOptions(names[0], tokenizer, settings, int(time.time()), tuple(names[1:]))
