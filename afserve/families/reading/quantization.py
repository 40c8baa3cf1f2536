"""`quantization_config` of a config.json: the one place that says which quantised checkpoints are read.

Only how weights are stored is read. Rows are multiplied in the engine's own dtype, so settings of activations, which
are about a kernel's speed, change nothing here. Every refusal names the key.
"""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.config_ranges import Range
from afserve.coverage import ModuleNames, QuantCoverage
from afserve.errors import UserError, shown
from afserve.quantization import Quantization

SUPPORTED = "fp8 with weight_block_size, compressed-tensors, gptq, awq, mxfp4, gguf"
_BLOCK = Range(1, 1 << 16)
_CODES = (4, 8)
_SAVED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")

Block = tuple[int, int]


def read_quantization(fields: ConfigFields) -> tuple[Block | None, Quantization | None]:
    """DeepSeek's FP8 blocks, or any other way; neither for a checkpoint that is not quantised."""
    config = fields.section("quantization_config") or fields.section("compression_config")
    if not config:
        return None, None
    quant = fields.inner(config, "quantization_config")
    method = quant.config.get("quant_method")
    if method == "fp8":
        return _fp8_block(fields, quant), None
    if method == "compressed-tensors":
        return None, _compressed(quant)
    if method == "gptq":
        return None, _gptq(quant)
    if method == "awq":
        return None, _awq(quant)
    if method == "mxfp4":
        return None, Quantization("mxfp4", 4, 32)
    if method == "gguf":
        return None, _gguf(quant)
    raise quant.error(f"method {shown(method)} is not supported; supported: {SUPPORTED}", "quant_method")


def _gguf(quant: ConfigFields) -> Quantization:
    """`experts` is how all of them are stored, if that is one way whose codes any backend may multiply."""
    experts = quant.config.get("experts")
    made = Quantization(
        "mixed",
        16,
        gguf=True,
        expert_bits=quant.number("expert_bits", default=16.0),
        map_bits=quant.number("map_bits", default=16.0),
        embedding_bits=quant.number("embedding_bits", default=16.0),
    )
    for layout in ("mxfp4", "q4_0"):
        if experts == layout:
            return replace(made, layout=layout, bits=4, group=32)
    quant.known_only("experts", "mixed")
    return made


def _fp8_block(fields: ConfigFields, quant: ConfigFields) -> Block:
    block = quant.config.get("weight_block_size")
    if not _is_block(block):
        raise fields.error(
            f"quantization_config.weight_block_size: {shown(block)} is not two sizes, each {_BLOCK}",
            "quantization_config",
        )
    return block[0], block[1]  # type: ignore[index]


def _is_block(block: object) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(map(_BLOCK.holds, block))


def _gptq(quant: ConfigFields) -> Quantization:
    form = quant.config.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise _odd(quant, "checkpoint_format", "gptq, gptq_v2")
    _no_overrides(quant)
    return Quantization(
        "gptq",
        _bits(quant, "bits", _CODES),
        _group(quant),
        symmetric=quant.flag("sym", True),
        ordered=quant.flag("desc_act", False),
        zero_shift=1 if form == "gptq" else 0,
    )


def _no_overrides(quant: ConfigFields) -> None:
    """GPTQModel's `dynamic` may leave modules out (-:), which are stored as they are, or quantise them otherwise."""
    dynamic = quant.section("dynamic")
    other = [name for name, how in dynamic.items() if not name.startswith("-:") and how]
    if other:
        raise quant.error(
            f"dynamic: {shown(other[0])} is quantised otherwise than the rest; afserve reads one way for a checkpoint",
            "dynamic",
        )


def _awq(quant: ConfigFields) -> Quantization:
    version = quant.config.get("version") or "gemm"
    if str(version).lower() != "gemm":
        raise _odd(quant, "version", "gemm")
    if not quant.flag("zero_point", True):
        raise quant.refuse("zero_point", "is not supported for AWQ; supported: true")
    return Quantization("awq", _bits(quant, "bits", (4,)), _group(quant), symmetric=False)


def _compressed(quant: ConfigFields) -> Quantization:
    _nothing_else(quant)
    groups = quant.section("config_groups")
    if not groups:
        raise quant.error("config_groups: missing, or without a group", "config_groups")
    read = {name: _scheme(quant, name, group) for name, group in groups.items()}
    (first, one), *others = read.items()
    for name, other in others:
        if other != one:
            raise quant.error(
                f"config_groups: {first} and {name} store weights in two ways; afserve reads one way for a checkpoint",
                "config_groups",
            )
    return one


def _nothing_else(quant: ConfigFields) -> None:
    """Sparsity and rotations change what a weight is."""
    sparsity = quant.section("sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise quant.error(f"sparsity_config: {shown(sparsity.get('format'))} is not dense", "sparsity_config")
    if quant.section("transform_config").get("config_groups"):
        raise quant.error(
            "transform_config: rotated weights are not supported; use a checkpoint without transforms",
            "transform_config",
        )


def _scheme(quant: ConfigFields, name: str, group: object) -> Quantization:
    here = quant.inner(group if isinstance(group, dict) else {}, f"config_groups.{name}")
    form = here.config.get("format") or quant.config.get("format")
    if form not in _SAVED:
        raise quant.error(f"format: {shown(form)} is not one of {', '.join(_SAVED)}", "format")
    weights = here.inner(here.section("weights"), "weights")
    if not weights.config:
        raise here.error("weights: missing", "weights")
    if weights.config.get("dynamic"):
        raise weights.error("dynamic: weights that are quantised while they run are not stored so", "dynamic")
    kind = weights.config.get("type", "int")
    if kind not in ("int", "float") or (form == "pack-quantized" and kind == "float"):
        raise weights.error(f"type: {shown(kind)} is not int or float, or does not go with {form}", "type")
    packed = form == "pack-quantized"
    how = Quantization(
        "pack-quantized" if packed else "scaled",
        _bits(weights, "num_bits", _CODES if packed else (8,)),
        symmetric=weights.flag("symmetric", True),
        ordered=str(weights.config.get("actorder")).lower() in ("group", "dynamic", "true"),
    )
    if how.ordered and not packed:
        raise weights.refuse(
            "actorder", f"is not supported with {form}; supported: weight, or pack-quantized"
        )
    shared = _shared(how, weights)
    if shared.block is not None and packed:
        raise _odd(weights, "strategy", "tensor, channel, group with pack-quantized")
    return shared


def _shared(how: Quantization, weights: ConfigFields) -> Quantization:
    """With what is said of which weights share a scale."""
    strategy = weights.config.get("strategy")
    size = weights.config.get("group_size")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "tensor":
        return replace(how, per_tensor=True)
    if strategy == "channel":
        return how
    if strategy == "group":
        return replace(how, group=_group(weights))
    block = weights.config.get("block_structure")
    if strategy == "block" and _is_block(block):
        return replace(how, block=(block[0], block[1]))  # type: ignore[index]
    if strategy == "block":
        raise weights.error(
            f"block_structure: {shown(block)} is not two sizes, each {_BLOCK}", "block_structure"
        )
    raise _odd(weights, "strategy", "tensor, channel, group, block")


def _bits(fields: ConfigFields, name: str, known: tuple[int, ...]) -> int:
    bits = fields.config.get(name)
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in known:
        raise _odd(fields, name, " or ".join(map(str, known)))
    return bits


def _group(fields: ConfigFields) -> int | None:
    """Inputs to a scale; -1 stands for all."""
    size = fields.config.get("group_size")
    if size == -1:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or not _BLOCK.holds(size):
        raise fields.refuse("group_size", f"is neither -1 nor {_BLOCK}")
    return size


def _odd(fields: ConfigFields, name: str, known: str) -> UserError:
    return fields.error(
        f"{name}: {shown(fields.config.get(name))} is not supported; supported: {known}", name
    )


_LISTS = ("ignore", "modules_to_not_convert", "ignored_layers")
_KEYS = {"compressed-tensors": "ignore", "gptq": "dynamic"}  # where a method lists what stays as it is
_WHOLE = 16  # bits of a module that AutoRound leaves as it is


def read_coverage(fields: ConfigFields) -> QuantCoverage | None:
    """Which linear maps are stored in few bits, by names and patterns; each method has its own keys for the same. None
    for a checkpoint that is not quantised. `read_quantization` has refused what is no section."""
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
