"""afserve: Mixture-of-Experts models served with attention and experts on separate hardware.

The names below are imported on first use, so that `import afserve` never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from afserve.client import Client
    from afserve.client_async import AsyncClient
    from afserve.engine.request import SamplingParams
    from afserve.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncClient", "Client", "SamplingParams", "__version__"]

_HOME = {
    "LLM": "afserve.llm",
    "Client": "afserve.client",
    "AsyncClient": "afserve.client_async",
    "SamplingParams": "afserve.engine.request",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'afserve' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
