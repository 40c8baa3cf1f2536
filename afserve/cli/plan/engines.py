"""Which engines a question is planned with: those that `--engine` names, else all whose measured rows bear on it, the
one with the row most like it first."""

from dataclasses import replace
from pathlib import Path

from afserve.cli.plan.catalog import load_engine
from afserve.cli.plan.flags import LayoutFlags
from afserve.errors import ConfigError
from afserve.placement.planner.cluster_file import on_cpu
from afserve.placement.planner.perf.engine import PLAIN, Engine
from afserve.placement.planner.perf.engine_rows import BEARS
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.search import DevicePool

COLOCATED = ("vllm", "sglang", "tensorrt-llm", "deepseek")
AFD = ("fastafd", "step-3")
"""The engines that are asked where none is named."""


def engines_of(
    flags: LayoutFlags, pools: tuple[DevicePool, ...], curves: str, setting: Setting
) -> tuple[tuple[str, Engine], ...]:
    """(kind, engine) of both kinds. Kernel curves of the user's own, and CPU hosts, are planned as afserve."""
    if any(name.endswith(".jsonl") for name in flags.engines):
        own = replace(PLAIN, about=f"afserve as it was calibrated in {flags.engines[0]}")
        return ("colocated", own), ("afd", own)
    if not flags.engines and not _plain(pools, curves):
        return tuple((kind, _nearest(kind, pools, setting)[0]) for kind in ("colocated", "afd"))
    names = flags.engines or ("afserve",)
    found: dict[str, Engine] = {}
    loaded = [load_engine(name) for name in names]
    for engine in loaded:
        for kind in engine.kinds:
            if kind in found and len(loaded) > 1:
                raise ConfigError(
                    f"--engine {engine.name}: {found[kind].name} is of the same kind, {kind}; name one per kind"
                )
            found[kind] = engine
    if flags.kind and flags.engines and flags.kind not in found:
        raise ConfigError(
            f"--engine {loaded[0].name}: it has no plans of --kind {flags.kind}; name an engine of that kind, or drop "
            "--kind to compare"
        )
    for kind in ("colocated", "afd"):
        if kind not in found:
            found[kind] = _other(loaded[0], kind)
    return tuple(found.items())


def _other(engine: Engine, kind: str) -> Engine:
    """The engine of the other kind that this one is compared with."""
    return load_engine(engine.against or (COLOCATED if kind == "colocated" else AFD)[0])


def others_of(
    flags: LayoutFlags, pools: tuple[DevicePool, ...], curves: str, setting: Setting
) -> tuple[tuple[str, Engine], ...]:
    """(kind, engine) of those that bear on the question beside the ones that lead; none where one was named."""
    if flags.engines or _plain(pools, curves):
        return ()
    return tuple(
        (kind, engine) for kind in ("colocated", "afd") for engine in _nearest(kind, pools, setting)[1:]
    )


def _plain(pools: tuple[DevicePool, ...], curves: str) -> bool:
    own_curves = Path(curves).suffix in (".jsonl", ".toml")
    return own_curves or all(on_cpu(pool.chip.name) for pool in pools)


def _nearest(kind: str, pools: tuple[DevicePool, ...], setting: Setting) -> list[Engine]:
    """The engines of that kind that bear on the question, that with the row most like it on any of the pools first.
    Both of AFD do, and where no row of any is like it, all of that kind."""
    layouts = ("dp", "dp tp", "tp", "tp ep") if kind == "colocated" else ("afd",)
    asked = [(setting.like(pool.chip, layout), pool.count) for pool in pools for layout in layouts]
    loaded = [load_engine(name) for name in (COLOCATED if kind == "colocated" else AFD)]
    alike = {e.name: max(e.rows.nearest(like, most) for like, most in asked) for e in loaded}
    if max(alike.values()) <= BEARS:
        return loaded
    loaded.sort(key=lambda engine: -alike[engine.name])
    return loaded if kind == "afd" else [engine for engine in loaded if alike[engine.name] > BEARS]
