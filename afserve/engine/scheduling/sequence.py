"""One request while it runs: its tokens, its blocks and how far it has come. Integers only."""

from collections.abc import Sequence as Many
from copy import copy
from dataclasses import dataclass, field

from afserve.comm.kv.sharing import SharedPrompt
from afserve.engine.kv.blocks import ROOT, Hash, block_hash, pictured, salted
from afserve.engine.scheduling.found_below import NONE_BELOW, FoundBelow
from afserve.engine.scheduling.guides import Guide
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams, TokenLogprob
from afserve.engine.scheduling.routed_experts import RoutedExperts
from afserve.engine.scheduling.turns import Group


@dataclass(slots=True)
class Sequence:
    """`computed` counts tokens whose keys and values are in the cache; `tokens` is prompt then output; the names of its
    blocks begin with `root`. The first `given` tokens were there when it entered the queue: to compute them is prompt
    work, also where they were generated before a preemption or on another node. `lacks` of them were neither cached
    when it entered the queue nor other nodes' to compute; it is computed from `entered` on. The lowest `rank` runs
    first: by priority, then the elder; prompts go by their `turn` before their age. `arrived` and `planned` are when it
    entered the queue and first left it, on its node's clock: nothing is decided by them. Other nodes compute parts of a
    `shared` prompt. The first `counted` tokens were computed before a preemption. Where experts of tokens are wanted,
    those of the first `routed_end` are `routed` or were told; the others are of tokens that it computes itself.

    `draft` is what somebody supposes to follow `tokens`. The next step computes it beside the newest token, and
    `commit` clears it. It is set between two steps."""

    request: GenerationRequest
    order: int
    eos_ids: frozenset[int]
    tokens: list[int]
    root: Hash = ROOT
    guide: Guide | None = None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[Hash] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)  # of its beginnings, as `prefix_keys` has them
    micro_batch: int = -1
    in_flight: bool = False
    cancelled: bool = False
    preemptions: int = 0
    counted: int = 0
    lacks: int = 0
    entered: int = 0
    turn: int = 0
    cached_tokens: int = 0
    found_below: FoundBelow = NONE_BELOW
    started: bool = False
    arrived: float = 0.0
    planned: float | None = None
    shared: SharedPrompt | None = None
    draft: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    routed: list[RoutedExperts] = field(default_factory=list)  # not told yet
    routed_end: int = field(init=False)
    row: bytes = field(init=False)  # its next token is drawn from it, without a step
    prompt_length: int = field(init=False)
    given: int = field(init=False)
    rank: tuple[int, int] = field(init=False)
    group: Group = field(init=False)
    unread: bool = field(init=False)  # of its rows but for the likeliest token, min_tokens apart

    def __post_init__(self) -> None:
        self.prompt_length = len(self.request.prompt_ids)
        self.given = len(self.tokens)
        self.rank = self.request.priority, self.order
        self.group = self.request.tenant.name, self.request.priority
        generated = len(self.request.generated)
        self.routed_end = self.prompt_length + generated - 1 if generated else 0
        self.row = b"" if self.wants_routed else self.request.row
        params, request = self.request.params, self.request
        told = self.guide is not None or params.logprobs is not None or params.pooled or self.wants_routed
        self.unread = takes_likeliest(params) and not (told or request.wants_row or request.ahead)

    @classmethod
    def start(
        cls,
        request: GenerationRequest,
        order: int,
        eos_ids: frozenset[int],
        root: Hash = ROOT,
        guide: Guide | None = None,
    ) -> "Sequence":
        tokens = [*request.prompt_ids, *request.generated]
        return cls(request, order, eos_ids, tokens, salted(root, request.cache_salt), guide)

    @property
    def ready(self) -> bool:
        """Whether it could run; else its grammar is being compiled."""
        return self.guide is None or self.guide.ready

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def made(self) -> int:
        """Tokens since it last entered the queue."""
        return len(self.tokens) - self.given

    @property
    def prompt_rank(self) -> tuple[int, int, int]:
        """The lowest of its tenant's prompts is computed first."""
        return self.request.priority, self.turn, self.order

    @property
    def prompt_left(self) -> int:
        """Tokens that it brought and lacks, still to be computed."""
        left = self.given - self.computed
        return min(self.lacks, left) if left > 0 else 0

    @property
    def untouched(self) -> bool:
        """Whether nothing was begun for it since it entered, here or by other nodes."""
        begun = self.in_flight or self.made or self.row or self.shared is not None
        return not begun and self.computed == self.entered

    @property
    def pending(self) -> int:
        """Tokens that are known but not yet computed; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether its next step computes the one token that was drawn last."""
        return self.computed >= self.given and self.pending == 1 and not self.in_flight

    def supposing(self, run: Many[int]) -> "Sequence":
        """As it would be behind `run`, to draw a token from; nobody runs it."""
        other = copy(self)
        other.tokens = [*self.tokens, *run]
        return other

    @property
    def wants_routed(self) -> bool:
        return self.request.params.return_routed_experts

    @property
    def collects_prompt(self) -> bool:
        """Log-probabilities of the prompt were asked for and neither told before nor complete yet."""
        wanted = self.request.params.prompt_logprobs is not None and not self.request.generated
        return wanted and len(self.prompt_logprobs) < self.prompt_length

    def written_names(self, block_size: int) -> list[Hash]:
        """Names of the blocks whose keys and values are all in the cache."""
        return self.full_hashes(block_size)[: self.computed // block_size]

    def usable_names(self, block_size: int) -> list[Hash]:
        """Names of the blocks that it could find instead of computing them: one token at least is left."""
        usable = 0 if self.collects_prompt else (len(self.tokens) - 1) // block_size
        if self.wants_routed:
            usable = min(usable, self.routed_end // block_size)
        if self.shared is not None:
            usable = min(usable, self.shared.split.start // block_size)
        return self.full_hashes(block_size)[:usable]

    @property
    def complete(self) -> bool:
        """Its grammar allows no more. What does not follow the grammar is told when the next token is drawn."""
        return self.guide is not None and self.guide.complete(self.tokens, self.prompt_length)

    def full_hashes(self, block_size: int) -> list[Hash]:
        """Hashes of all full blocks of `tokens`, kept and extended."""
        while (len(self.hashes) + 1) * block_size <= len(self.tokens):
            start = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else self.root
            if self.request.tiles:
                begun = (tile for tile in self.request.tiles if 0 <= tile.start - start < block_size)
                parent = pictured(parent, begun)
            self.hashes.append(block_hash(parent, self.tokens[start : start + block_size]))
        return self.hashes


def takes_likeliest(params: SamplingParams) -> bool:
    """Whether each token is the likeliest one of its row as it is, where no min_tokens are lacking."""
    edited = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    return params.greedy and not (edited or params.logit_bias)


def turn_of(sequence: Sequence) -> tuple[int, tuple[int, ...]]:
    """Decoding first, then verifying, by rank; then prompts, by their turns."""
    if sequence.computed < sequence.given:
        return 2, sequence.prompt_rank
    return int(len(sequence.tokens) - sequence.computed > 1), sequence.rank
