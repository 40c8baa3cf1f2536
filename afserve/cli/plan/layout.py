"""What is fixed and not sought: how flags of the layout, of the requests in flight and of calibrations become a
`GivenLayout` and fields of a `Setting`."""

from dataclasses import replace
from pathlib import Path

from afserve.cli.plan.flags import LayoutFlags
from afserve.errors import ConfigError, shown
from afserve.placement.planner.cluster_file import on_cpu
from afserve.placement.planner.perf.setting import PrefillSetting, Setting
from afserve.placement.planner.question import Question
from afserve.placement.planner.search import DevicePool, GivenLayout


def layout_of(flags: LayoutFlags, pools: tuple[DevicePool, ...]) -> GivenLayout:
    if flags.kind == "afd" and flags.devices:
        raise ConfigError("--devices is of colocated plans and --kind afd has none; drop one")
    if flags.kind == "colocated" and (flags.attention_devices or flags.expert_devices):
        raise ConfigError(
            "--attention-devices and --expert-devices are of AFD plans and --kind colocated has none; drop one",
            param="kind",
        )
    most = sum(pool.count for pool in pools)
    for name in ("attention_devices", "expert_devices", "devices", "tensor_parallel", "prefill_devices"):
        asked = getattr(flags, name)
        if asked and asked > most:
            said = name.replace("_", "-")
            raise ConfigError(f"--{said} {asked}: the pools have {most} devices; offer more", param=name)
    sides = (flags.attention_devices or 0) + (flags.expert_devices or 0)
    if sides > most:
        raise ConfigError(
            f"--attention-devices {flags.attention_devices} and --expert-devices {flags.expert_devices} are {sides} "
            f"devices: the pools have {most}; offer more"
        )
    return GivenLayout(
        attention_devices=flags.attention_devices or 0,
        expert_devices=flags.expert_devices or 0,
        devices=flags.devices or 0,
        tensor_parallel=flags.tensor_parallel or 0,
        running=flags.max_running or 0,
        slices=flags.expert_slices,
    )


def with_requests(setting: Setting, flags: LayoutFlags, ttft: str | None) -> Setting:
    """The setting with its requests in flight and its prefill instances."""
    prefill = None
    if flags.prefill_devices or flags.prefill_workers:
        if not setting.workload.decode_only or not flags.concurrency or setting.workload.mean_answer <= 1:
            raise ConfigError(
                "--prefill-devices and --prefill-workers are for prompts that are read elsewhere: they need --input, "
                "--output, --decode-only and --concurrency"
            )
        prefill = PrefillSetting(flags.prefill_devices or 0, flags.prefill_workers or 1.0)
    if flags.concurrency and ttft is not None:
        raise ConfigError(
            "--ttft: with --concurrency the first token is told and not sought; drop one of them"
        )
    return replace(
        setting, concurrency=flags.concurrency or 0.0, split_experts=flags.expert_slices, prefill=prefill
    )


def calibration_of(flags: LayoutFlags, curves: str | None) -> str | None:
    """The .jsonl among the engines: curves of the user's own machine. `curves`: what --curves says."""
    found = [name for name in flags.engines if name.endswith(".jsonl")]
    if found and len(flags.engines) > 1:
        raise ConfigError(f"--engine {found[0]}: a calibration is both kinds of one engine; name no other")
    if found and curves is not None:
        raise ConfigError(
            f"--curves {curves}: --engine {found[0]} has the curves of its machine; drop one of them"
        )
    return found[0] if found else None


def check_calibrated(option: str, curves: str, pools: tuple[DevicePool, ...]) -> None:
    """Stage times of one machine say nothing of other hardware."""
    other = next((pool.chip.name for pool in pools if not on_cpu(pool.chip.name)), None)
    if Path(curves).suffix == ".jsonl" and other:
        raise ConfigError(
            f"--{option} {curves}: a calibration is of CPU hosts, and --pool {other} is none; offer hosts whose name "
            "begins with cpu, such as cpu-host"
        )


def on_one_machine(question: Question, cores: int | None) -> Question:
    """With all nodes of AFD on so many cores of one machine. Raises ConfigError naming what that needs."""
    if cores is None:
        return question
    layout, setting = question.layout, question.setting
    drafted = setting.drafts.tokens > 0 or len(question.draftable) > 0
    lacks = {
        "--engine FILE.jsonl: only a calibration says how its processes slow each other down": not (
            setting.curves.name.endswith(".jsonl")
        ),
        "--attention-devices and --expert-devices: one layout is played": not (
            layout.attention_devices and layout.expert_devices
        ),
        "--concurrency: so many requests are in flight": not setting.concurrency,
        "--context or --decode-only: prompts are not played": not setting.workload.decode_only,
    }
    missing = next((what for what, lacking in lacks.items() if lacking), None)
    if missing:
        raise ConfigError(f"--cores {cores}: it needs {missing}")
    for said, given in (
        ("--kind colocated has one process", "afd" not in question.kinds),
        ("--rate is not played", question.tokens_per_second > 0),
        ("--tensor-parallel: a node is one process", layout.tensor_parallel > 1),
        ("--draft is not played", drafted),
    ):
        if given:
            raise ConfigError(f"--cores {cores}: {said}; drop one of them")
    from afserve.placement.planner.one_machine import OneMachine

    return replace(question, machine=OneMachine(question.setting_for("afd"), question.pools[0].chip, cores))


def micro_batches_of(text: str) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(part[:8]) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < 1 or found[-1] > 4:
        raise ConfigError(f"--micro-batches: {shown(text)} is not a list of counts from 1 to 4")
    return found
