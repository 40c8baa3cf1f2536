"""Which modules of a checkpoint are stored in few bits, by their names: plain text, no tensors.

Checkpoints list modules in the words of whoever made them: whole names, ends of names, patterns. A name counts where
any of these ways to read it fits, so that nothing is refused that its maker left out. Whoever made them is not trusted:
patterns are matched in bounded time, or refused.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property

from afserve.errors import CheckpointError
from afserve.patterns import Pattern, is_pattern

MOST_PATTERNS = 256  # in one list
_WORDS = re.compile(r"[\w.-]*")  # what is no pattern
_ROUTED_ONLY = "mxfp4"  # stores routed experts so, and tensors of all experts too
_LINEAR = re.compile(r"(.*\.)?((?!eh_)[a-z_]+_proj|kv_a_proj_with_mqa|w[123]|Wqkv)")
"""Linear maps that every method stores in few bits. Embeddings, heads, routers and gates need not be left out, nor what
joins both rows of a layer of multi-token prediction: DeepSeek's FP8 checkpoints have it in bfloat16, unsaid."""


@dataclass(frozen=True)
class ModuleNames:
    """`listed` as a config.json has them; `anywhere`: each is any part of a name's text (AutoAWQ). Errors name `where`
    they are listed."""

    listed: tuple[str, ...] = ()
    anywhere: bool = False
    where: str = field(default="config.json", compare=False)

    def check(self) -> None:
        """Raises CheckpointError where a pattern is not matched here."""
        _ = self._patterns

    def __bool__(self) -> bool:
        return bool(self.listed)

    def holds(self, module: str) -> bool:
        """Whether `module`, or one that it lies in, is listed."""
        names = module, _below_layers(module)
        if self.anywhere and any(one in module for one in self.listed):
            return True
        if any(run in self._plain for run in _runs(names[1])):
            return True
        if module in self._plain or any(name.startswith(self._begins) for name in names):
            return True
        return any(one.match(name) for one in self._patterns for name in names)

    @cached_property
    def _plain(self) -> frozenset[str]:
        return frozenset(_below_layers(one.strip(".").removesuffix(".weight")) for one in self.listed)

    @cached_property
    def _marked(self) -> tuple[str, ...]:
        """What is no plain name."""
        return tuple(one.removeprefix("re:") for one in self.listed if not _WORDS.fullmatch(one))

    @cached_property
    def _begins(self) -> tuple[str, ...]:
        """Whatever is no pattern stands for itself."""
        return tuple(one for one in self._marked if not is_pattern(one))

    @cached_property
    def _patterns(self) -> tuple[Pattern, ...]:
        texts = [one for one in dict.fromkeys(self._marked) if is_pattern(one)]
        if len(texts) > MOST_PATTERNS:
            raise CheckpointError(
                f"{self.where}: lists {len(texts)} patterns, at most {MOST_PATTERNS} are matched here; join them with "
                "|, or list the names of the modules"
            )
        return tuple(Pattern(text, self.where) for text in texts)


@dataclass(frozen=True, slots=True)
class QuantCoverage:
    """`method` as quant_method has it, `key` where it lists what it leaves out. `only`: nothing else is quantised."""

    method: str
    key: str
    left_out: ModuleNames = field(default_factory=ModuleNames)
    only: ModuleNames = field(default_factory=ModuleNames)

    def covers(self, module: str, stacked: bool = False) -> bool:
        """Whether a matrix of this module is said to be in few bits; `stacked`: one of tensors of all experts."""
        if not _LINEAR.fullmatch(module) or (stacked and self.method != _ROUTED_ONLY):
            return False
        if self.method == _ROUTED_ONLY and ".experts." not in module:
            return False
        return (not self.only or self.only.holds(module)) and not self.left_out.holds(module)


def _below_layers(name: str) -> str:
    """What stands before differs between versions of a model's code."""
    _, found, rest = name.partition("layers.")
    return f"layers.{rest}" if found else name


def _runs(name: str) -> list[str]:
    """All runs of whole parts: `mlp.gate` of `layers.3.mlp.gate.x`."""
    parts = name.split(".")
    return [".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
