"""Whether numbers of a few bits can be what was asked for: something on the devices has to multiply them. Values in, no
values out."""

from afserve.config import AUTO, MODEL_DTYPE, ModelSource
from afserve.errors import ConfigError
from afserve.launch.plan.footprint import computed_dtype, gpus_multiply_fp8
from afserve.launch.plan.wishes import Wishes
from afserve.spec import BYTES, FP8_BLOCK, ModelSpec


def check_bits(spec: ModelSpec, source: ModelSource, wishes: Wishes) -> None:
    """Raises ConfigError."""
    dense, computed = wishes.engine.dense_dtype, computed_dtype(spec, source)
    few = dense not in (AUTO, MODEL_DTYPE)
    if dense == "fp8":
        _check_blocks(spec, wishes, computed)
    elif few and wishes.engine.device != "cpu":
        raise ConfigError(
            f"--dense-dtype {dense}: only CPUs keep them so, not --device {wishes.engine.device}; leave it out"
        )
    elif few and computed == "float16":
        raise ConfigError(
            f"--dense-dtype {dense}: multiplies bfloat16 or float32 rows on CPUs, not float16; add --dtype bfloat16"
        )
    old = wishes.engine.device != "cpu" and wishes.gpus is not None and not wishes.gpus.fp8
    if wishes.engine.kv_dtype == "fp8" and old:
        told = "the GPUs here have no FP8 conversions (compute capability 8.9 or newer)"
        raise ConfigError(f"--kv-dtype fp8: {told}; use int8, or leave it out", param="kv_dtype")
    kept = wishes.engine.expert_dtype
    if kept != AUTO and wishes.experts_on == "cpu" and computed == "float16":
        raise ConfigError(
            f"--expert-dtype {kept}: multiplies bfloat16 or float32 rows on CPUs, not float16; add --dtype bfloat16"
        )


def _check_blocks(spec: ModelSpec, wishes: Wishes, computed: str) -> None:
    why = ""
    if wishes.engine.device == "cpu":
        why = "only GPUs multiply linear maps in FP8 blocks, not --device cpu"
    elif not spec.in_fp8_blocks:
        why = f"config.json has no FP8 blocks of {FP8_BLOCK} x {FP8_BLOCK} (weight_block_size of quantization_config)"
    elif not gpus_multiply_fp8(wishes, computed):
        old = "the GPUs here have no FP8 matrix instructions (compute capability 8.9 or newer)"
        why = f"{computed} rows are not rounded to FP8" if BYTES[computed] > 2 else old
    if why:
        raise ConfigError(f"--dense-dtype fp8: {why}; leave it out", param="dense_dtype")
