"""Which devices attention nodes are on, how many each and of which kinds: whether model, machine and the rest of what
was asked for allow it, the shapes of what lies in one memory, and the tokens of a step. Values in, values out."""

from dataclasses import replace

from afserve.config import AUTO, MODEL_DTYPE, ModelSource
from afserve.errors import ConfigError, DoesNotFitError
from afserve.families.device_shares import FLAG, check_split, shares_of
from afserve.families.fp8_maps import parameters_in_blocks
from afserve.launch.plan.footprint import element_bytes, kept_dense, role_bytes, saved_by_blocks
from afserve.launch.plan.wishes import Share, Wishes
from afserve.spec import ModelSpec

_ON_CPU, _ON_GPU = 512, 2048  # tokens of one step


def check_devices(spec: ModelSpec, wishes: Wishes, nodes: Share, picked: dict[str, str]) -> None:
    """Raises ConfigError, or DoesNotFitError where there are too few GPUs."""
    engine, count = wishes.engine, wishes.engine.tensor_parallel
    if count == 1:
        return
    check_split(spec, count)
    if engine.dense_dtype not in (AUTO, "fp8", MODEL_DTYPE):
        raise ConfigError(
            f"{FLAG} {count} and --dense-dtype: maps that are split keep the model's numbers; leave out one",
            param="tensor_parallel",
        )
    if engine.device == "cpu":
        picked["devices"] = (
            f"{count} of each attention node are pretended: one processor computes them in turn"
        )
        return
    _check_gpus(wishes, nodes)
    picked["devices"] = f"{count} GPUs for each attention node"


def of_kinds(spec: ModelSpec, wishes: Wishes, picked: dict[str, str]) -> Wishes:
    """What every attention node can have, where prefill nodes are on another kind of device than decode nodes: FP8
    blocks of linear maps stay on none. Raises ConfigError."""
    engine = wishes.engine
    if len(wishes.attention_on) == 1:
        return wishes
    for device in sorted(wishes.attention_on):
        replace(engine, device=device)  # raises
    if engine.dense_dtype not in (AUTO, MODEL_DTYPE):
        raise ConfigError(
            f"--dense-dtype {engine.dense_dtype}: prefill nodes on {wishes.prefill_device} and decode nodes on "
            f"{engine.device} would not round weights alike; leave it out",
            param="dense_dtype",
        )
    if not spec.in_fp8_blocks:
        return wishes
    picked["dense-dtype"] = f"{MODEL_DTYPE}, so that nodes on CPUs and on GPUs compute alike"
    return replace(wishes, engine=replace(engine, dense_dtype=MODEL_DTYPE))


def _check_gpus(wishes: Wishes, nodes: Share) -> None:
    count = wishes.engine.tensor_parallel
    if wishes.colocated:
        raise ConfigError(
            f"{FLAG} {count} and --colocated: all routed experts would be on the first GPU of a node; give --experts N "
            "in the place of --colocated",
            param="tensor_parallel",
        )
    if wishes.hosts or wishes.gpus is None:
        raise ConfigError(
            f"{FLAG} {count}: GPUs of a node are those of one machine's run; leave it out with --cluster, --ray and "
            "--elsewhere",
            param="tensor_parallel",
        )
    if wishes.engine.device != "cuda":
        raise ConfigError(
            f"{FLAG} {count}: --device {wishes.engine.device} is one GPU; use --device cuda",
            param="tensor_parallel",
        )
    needed = count * nodes.attention + nodes.experts
    if needed > len(wishes.gpus):
        asked = wishes.attention or wishes.experts
        instead = "ask for fewer" if asked else "use a smaller N, leave it out, or use a machine with more"
        raise DoesNotFitError(
            f"{FLAG} {count}: {_nodes(nodes.attention, 'attention')} of {count} GPUs and "
            f"{_nodes(nodes.experts, 'expert')} take {needed}, and {len(wishes.gpus)} are here; {instead}"
        )


def _nodes(count: int, role: str) -> str:
    return f"{count} {role} node{'s' * (count != 1)}"


def batch_tokens(wishes: Wishes, micro_batches: int | None, picked: dict[str, str]) -> int:
    """The most tokens of one step of an attention node that has no phase; `micro_batches` None: chosen while serving.

    A step reads each expert that its rows choose, and a GPU multiplies some 200 rows of each (H200, FP8) in the time
    that it takes to read it: DeepSeek-V3's have 16 rows of 512 tokens and 64 of 2,048.
    """
    if wishes.engine.max_batch_tokens is not None:
        return wishes.engine.max_batch_tokens
    decoding = -(-(wishes.batch or 0) // (micro_batches or 1))
    if "cpu" in wishes.attention_on:
        return max(_ON_CPU, decoding)
    if wishes.prefill is None:
        picked["max-batch-tokens"] = f"{_ON_GPU:,} tokens of one step, since attention nodes are on GPUs"
    return max(_ON_GPU, decoding)


def kept_shapes(spec: ModelSpec, wishes: Wishes) -> tuple[ModelSpec, ...]:
    """Shapes of what one attention node keeps in one memory: a GPU's, or a host's, where all its devices are."""
    count = wishes.engine.tensor_parallel
    if count == 1:
        return (spec,)
    return shares_of(spec, count).in_memory(together=wishes.engine.device == "cpu")


def attention_bytes(spec: ModelSpec, source: ModelSource, wishes: Wishes, kept: str) -> int:
    """Weights of an attention node in one memory: on GPUs those of its first device, which has the most. `kept`: the
    experts' dtype."""
    count, dense, size = (
        wishes.engine.tensor_parallel,
        kept_dense(spec, source, wishes),
        element_bytes(source, spec),
    )
    if count == 1:
        return role_bytes(spec, source, kept, dense)[0]
    shares = shares_of(spec, count, split_head=not wishes.engine.drafts().head)
    further = shares.more * shares.further_parameters if wishes.engine.device == "cpu" else 0
    blocks = parameters_in_blocks(shares.leading) if dense == "fp8" else 0
    return (shares.leading_parameters + further) * size - saved_by_blocks(blocks, size)
