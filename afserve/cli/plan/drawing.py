"""matplotlib for pictures that are written to a file: it is an extra, and needs no display."""

from pathlib import Path
from typing import Any

from afserve.errors import ConfigError, shown


def pyplot_for(option: str, path: Path) -> Any:
    """matplotlib's pyplot, to write `path`. Raises ConfigError where it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError(
            f"--{option} {shown(str(path))}: matplotlib is not installed; pip install 'afserve[plot]', or ask for "
            ".html"
        ) from error
    mpl.use("agg")
    from matplotlib import pyplot

    return pyplot
