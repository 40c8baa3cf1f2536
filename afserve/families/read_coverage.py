"""Which linear maps a config.json says are stored in few bits: what `quantization_config` names and leaves out.

Each method has its own keys for the same. It reads names and patterns; whether a tensor is what they say, the reader of
tensors knows.
"""

from afserve.config_json import ConfigFields
from afserve.coverage import ModuleNames, QuantCoverage
from afserve.errors import shown

_LISTS = ("ignore", "modules_to_not_convert", "ignored_layers")
_KEYS = {"compressed-tensors": "ignore", "gptq": "dynamic"}  # where a method lists what stays as it is
_WHOLE = 16  # bits of a module that AutoRound leaves as it is


def read_coverage(fields: ConfigFields) -> QuantCoverage | None:
    """None for a checkpoint that is not quantised. `read_quantization` has refused what is no section."""
    config = fields.section("quantization_config") or fields.section("compression_config")
    if not config:
        return None
    quant = fields.inner(config, "quantization_config")
    method = str(config.get("quant_method"))
    left_out = ModuleNames(_left_out(quant), method == "awq", quant.where)
    only = ModuleNames(_named(quant), where=quant.where)
    for names in (left_out, only):
        names.check()
    return QuantCoverage(method, _KEYS.get(method, "modules_to_not_convert"), left_out, only)


def _left_out(quant: ConfigFields) -> tuple[str, ...]:
    """GPTQModel's `dynamic` leaves out what begins with -:, AutoRound's `extra_config` what has 16 bits."""
    listed = [name for key in _LISTS for name in _strings(quant, key)]
    dynamic = [f"re:{name[2:]}" for name in quant.section("dynamic") if name.startswith("-:")]
    extra = [name for name, how in quant.section("extra_config").items() if _is_whole(how)]
    return (*listed, *dynamic, *extra)


def _is_whole(how: object) -> bool:
    bits = how.get("bits") if isinstance(how, dict) else None
    return isinstance(bits, int) and bits >= _WHOLE


def _named(quant: ConfigFields) -> tuple[str, ...]:
    """Those that are quantised; nothing where that is all of a class, such as Linear."""
    inner = quant.config.get("modules_in_block_to_quantize")
    if inner is not None:
        parts = inner if isinstance(inner, list) else [inner]
        flat = [name for part in parts for name in (part if isinstance(part, list) else [part])]
        return _checked(quant, "modules_in_block_to_quantize", flat)
    targets = [
        name
        for group in quant.section("config_groups").values()
        if isinstance(group, dict)
        for name in _strings(quant.inner(group, "config_groups"), "targets")
    ]
    return () if any(_is_class(name) for name in targets) else tuple(targets)


def _is_class(name: str) -> bool:
    return name.isidentifier() and name[:1].isupper()


def _strings(quant: ConfigFields, key: str) -> tuple[str, ...]:
    value = quant.config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise quant.refuse(key, "is not a list of names of modules")
    return _checked(quant, key, value)


def _checked(quant: ConfigFields, key: str, names: list[object]) -> tuple[str, ...]:
    for name in names:
        if not isinstance(name, str):
            raise quant.error(f"{key}: {shown(name)} is not the name of a module", key)
    return tuple(map(str, names))
