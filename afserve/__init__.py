"""afserve: Mixture-of-Experts models served with attention and experts on separate hardware.

The names below are imported on first use, so that `import afserve` never imports torch. `__init__.pyi`
says where they are to who checks types.
"""

from importlib import import_module

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncClient", "Client", "SamplingParams", "__version__"]

_HOME = {
    "LLM": "afserve.doors.llm",
    "Client": "afserve.doors.client",
    "AsyncClient": "afserve.doors.client",
    "SamplingParams": "afserve.engine.scheduling.request",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'afserve' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
