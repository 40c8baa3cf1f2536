"""Whether rows of a model's cache may lie in memory of the host, of which those that an indexer chose are fetched."""

from afserve.config import EngineSettings
from afserve.errors import ConfigError
from afserve.spec import ModelSpec, far_row_bytes

_FLAG = "--kv-near-rows"


def check_near_rows(spec: ModelSpec, engine: EngineSettings) -> None:
    """Raises ConfigError where this model has no such rows, or too few of them would be near."""
    rows, layers = engine.kv_near_rows, [spec.layer(n) for n in range(spec.layers)]
    if not rows:
        return
    tops = [a.indexer.top for a in (one.attention for one in layers) if a.indexer and far_row_bytes(a, 1)]
    if not tops:
        told = "no layer of this model has latents of which an indexer chooses; leave it out"
        raise ConfigError(f"{_FLAG} {rows}: {told}", param="kv_near_rows")
    if spec.windowed_layers:
        told = "this model has layers with windows, whose blocks are apart; leave it out"
        raise ConfigError(f"{_FLAG} {rows}: {told}", param="kv_near_rows")
    if rows < max(tops):
        told = f"a token attends {max(tops)}; at least as many"
        raise ConfigError(f"{_FLAG} {rows}: {told}", param="kv_near_rows")
    if engine.tensor_parallel > 1:
        told = "with --tensor-parallel each device would have a copy of all rows in the host; leave out one"
        raise ConfigError(f"{_FLAG} {rows}: {told}", param="kv_near_rows")
