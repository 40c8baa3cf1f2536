"""What a gateway process is told by whoever starts it. A value of its own: only gateways import the HTTP server."""

import time
from dataclasses import asdict, dataclass
from typing import Any

from afserve.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """What a gateway is told by whoever starts it, beside what the controller assigns. `created` in Unix seconds."""

    name: str
    tokenizer: str
    settings: ServerSettings
    created: int

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        plain = asdict(self)
        plain["settings"]["hosts"] = sorted(self.settings.hosts)
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "GatewayOptions":
        settings = dict(plain["settings"])
        for name in ("api_keys", "admin_keys", "origins"):
            settings[name] = tuple(settings[name])
        settings["hosts"] = frozenset(settings["hosts"])
        return cls(plain["name"], plain["tokenizer"], ServerSettings(**settings), plain["created"])


def options_of(name: str, tokenizer: str, settings: ServerSettings) -> GatewayOptions:
    return GatewayOptions(name, tokenizer, settings, int(time.time()))
