"""The libraries that can carry payloads of KV blocks, by the name that `--kv-transport` has for them."""

from collections.abc import Callable, Mapping

from afserve.comm.kv.carriers.carrier import Carrier, Memory
from afserve.comm.kv.carriers.mooncake import Mooncake
from afserve.comm.kv.carriers.nixl import Nixl
from afserve.errors import ConfigError

CARRIERS: Mapping[str, Callable[[str, Memory], Carrier]] = {"mooncake": Mooncake, "nixl": Nixl}
_MODULES = {"mooncake": "mooncake.engine", "nixl": "nixl._api"}


def lacking(name: str) -> str:
    """Why this library cannot be used in this installation, and how to get it; empty where it is here."""
    from importlib import import_module

    try:
        import_module(_MODULES[name])
    except ImportError as error:
        if ".so" in str(error):
            return f"{error}; apt install libibverbs1 librdmacm1 has what these libraries need"
        return f"not installed: pip install 'afserve[{name}]'"
    return ""


def open_carrier(name: str, host: str, memory: Memory) -> Carrier:
    """Raises ConfigError that says what is missing and how to get it."""
    if why := lacking(name):
        raise ConfigError(f"--kv-transport {name}: {why}", param="kv_transport")
    return CARRIERS[name](host, memory)
