"""Targets that benchmarks ask for, by name: `--slo mlperf-interactive`."""

from typing import TYPE_CHECKING

from afserve.errors import ConfigError

if TYPE_CHECKING:
    from afserve.placement.planner.perf.shape import ModelShape

NAMES = ("mlperf-server", "mlperf-interactive")
_LIMITS = {
    "deepseek-v3": {"mlperf-server": ("2s", "80ms"), "mlperf-interactive": ("1.5s", "15ms")},
    "gpt-oss-120b": {"mlperf-server": ("3s", "80ms"), "mlperf-interactive": ("2s", "20ms")},
    "mixtral-8x7b": {"mlperf-server": ("2s", "200ms")},
}
"""(TTFT, TPOT) at the 99th percentile, by MLPerf Inference's rules for datacenters. DeepSeek-R1 has V3's layers."""


def limits_of(name: str, shape: "ModelShape") -> tuple[str, str]:
    """(--ttft, --tpot). Raises ConfigError where the benchmark has no such limits for the model."""
    found = _LIMITS.get(shape.rows_name, {}).get(name)
    if found is None:
        known = ", ".join(f"{model} ({' and '.join(limits)})" for model, limits in _LIMITS.items())
        raise ConfigError(
            f"--slo {name}: MLPerf has no such limits for {shape.name}; it has for {known}", param="slo"
        )
    return found
