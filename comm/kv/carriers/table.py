"""What can carry payloads of KV blocks, by the name that `--kv-transport` has for it."""

from collections.abc import Callable, Mapping
from importlib import import_module

from afserve.comm.kv.carriers.carrier import Carrier, Memory
from afserve.comm.kv.carriers.mooncake import Mooncake
from afserve.comm.kv.carriers.nixl import Nixl
from afserve.errors import ConfigError


def _dist(host: str, memory: Memory) -> Carrier:
    from afserve.comm.kv.carriers.dist import Dist  # imports torch: whoever only asks for names does without

    return Dist(host, memory)


CARRIERS: Mapping[str, Callable[[str, Memory], Carrier]] = {"mooncake": Mooncake, "nixl": Nixl, "dist": _dist}
_MODULES = {"mooncake": "mooncake.engine", "nixl": "nixl._api"}


def lacking(name: str) -> str:
    """Why this cannot be used in this installation, and how to get it; empty where it is here."""
    if name not in _MODULES:
        return _lacking_gloo()
    try:
        import_module(_MODULES[name])
    except ImportError as error:
        if ".so" in str(error):
            return f"{error}; apt install libibverbs1 librdmacm1 has what these libraries need"
        return f"not installed: pip install 'afserve[{name}]'"
    return ""


def _lacking_gloo() -> str:
    try:
        distributed = import_module("torch.distributed")
    except ImportError as error:
        return f"{error}; pip install torch>=2.11"
    if distributed.is_available() and distributed.is_gloo_available():
        return ""
    return "this PyTorch has no gloo: install one that was built with torch.distributed"


def open_carrier(name: str, host: str, memory: Memory) -> Carrier:
    """Raises ConfigError that says what is missing and how to get it."""
    if why := lacking(name):
        raise ConfigError(f"--kv-transport {name}: {why}", param="kv_transport")
    return CARRIERS[name](host, memory)
