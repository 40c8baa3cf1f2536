"""One request while it runs: its tokens, its blocks and how far it has come. Integers only."""

from dataclasses import dataclass, field

from afserve.engine.blocks import ROOT, Hash, block_hash
from afserve.engine.request import GenerationRequest, TokenLogprob


@dataclass(slots=True)
class Sequence:
    """`computed` counts tokens whose keys and values are in the cache; `tokens` is prompt then output; the names of its
    blocks begin with `root`."""

    request: GenerationRequest
    order: int
    eos_ids: frozenset[int]
    tokens: list[int]
    root: Hash = ROOT
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[Hash] = field(default_factory=list)
    micro_batch: int = -1
    in_flight: bool = False
    cancelled: bool = False
    preemptions: int = 0
    cached_tokens: int = 0
    started: bool = False
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.request.prompt_ids)

    @classmethod
    def start(
        cls, request: GenerationRequest, order: int, eos_ids: frozenset[int], root: Hash = ROOT
    ) -> "Sequence":
        return cls(request, order, eos_ids, list(request.prompt_ids), root)

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def pending(self) -> int:
        """Tokens that are known but not yet computed; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def collects_prompt(self) -> bool:
        """Log-probabilities of the prompt were asked for and are not complete yet."""
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.prompt_length

    def full_hashes(self, block_size: int) -> list[Hash]:
        """Hashes of all full blocks of `tokens`, kept and extended."""
        while (len(self.hashes) + 1) * block_size <= len(self.tokens):
            start = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else self.root
            self.hashes.append(block_hash(parent, self.tokens[start : start + block_size]))
        return self.hashes
