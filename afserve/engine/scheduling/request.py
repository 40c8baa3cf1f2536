"""What is asked of the engine and what it says back: plain values, no tensors, no torch.

A `GenerationRequest` is one sequence to extend; `n > 1` becomes several requests above the engine.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple

from afserve.drafts import DRAFT_TOKENS
from afserve.engine.scheduling.found_below import NONE_BELOW, FoundBelow
from afserve.engine.scheduling.routed_experts import RoutedExperts
from afserve.errors import RequestError, shown
from afserve.tiles import PictureTile

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_PRIORITY = 1 << 20
AHEAD_PRIORITY = MAX_PRIORITY + 1  # of what nobody waits for: it is computed while nobody asks
MAX_SALT = 256
MAX_SHARE = 1000
MAX_TENANT = 97  # characters of a name: a key's, and a class of service behind a slash
MAX_RETAIN = 86_400.0  # seconds
MAX_DRAFT = int(DRAFT_TOKENS.high)
MAX_PREDICTION = 1 << 20  # tokens
NOT_FINITE = (
    "{where} gave values that are not finite (NaN or infinity), so this request ends here; other requests are not "
    "affected. The checkpoint may be damaged, or its numbers too large for the dtype"
)
NO_EXPERTS = (
    "{where}: {why}, so this request ends here; other requests are not affected. Send it again when the expert node is "
    "back or its experts stand elsewhere: afserve status shows both"
)
GREEDY_BELOW = 1e-5  # temperature: logits 1 apart differ by 100,000 below it, nothing is left to draw


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Ranges follow the OpenAI API, then vLLM for what OpenAI lacks.

    A temperature below 1e-5 is greedy. top_k 0 or -1 is off. `min_tokens` holds back every stop condition.
    `logprobs`: number of alternatives per sampled token (0 = only the sampled one), None = off.
    `prompt_logprobs`: the same for prompt tokens. `grammar` is one of `afserve.grammars.grammar`, which the text must
    follow; it ends where the grammar does, whatever `min_tokens` says. `pooled` asks for the prompt's vector and
    `return_routed_experts` for the experts of each token, see `TokenEvent`. `draft`: so many tokens at most are guessed
    for a step, 0 for none, None for what the run does. `stop` may be one string. Raises RequestError that names the
    field for any number outside its range, NaN and infinity among them.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    pooled: bool = False
    draft: int | None = None
    return_routed_experts: bool = False

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1, 1 << 24)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _whole("top_k", self.top_k, -1, 1 << 24)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _whole("n", self.n, 1, 128)
        if self.seed is not None:
            _whole("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value, 0, MAX_LOGPROBS)
        if self.draft is not None:
            _whole("draft", self.draft, 0, MAX_DRAFT)
        if self.grammar and self.ignore_eos:
            raise RequestError(
                "ignore_eos: an answer that follows a grammar ends with it; leave one of both out",
                param="ignore_eos",
            )
        if self.pooled and (self.max_tokens != 1 or self.n != 1):
            raise RequestError(
                "pooled: a vector of the prompt comes with one token; set max_tokens and n to 1",
                param="pooled",
            )
        self._check_stops()
        _check_biases(self.logit_bias)

    def _check_stops(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stops)
        for text in stops:
            if not isinstance(text, str):
                raise RequestError(f"stop: {shown(text)} is not a string", param="stop")
            if not text:
                raise RequestError("stop: an empty stop string would stop at once; remove it", param="stop")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, _MOST_ID)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def choices(self) -> "tuple[SamplingParams, ...]":
        """The parameters of each of the `n` sequences, with n 1. Sequence i has the seed `seed + i`, wrapped into the
        signed 64-bit range; without a seed each gets a random one of 63 bits, so that every request has one."""
        return tuple(self.choice(index) for index in range(self.n))

    def choice(self, index: int) -> "SamplingParams":
        """Those of one of them."""
        return replace(self, n=1, seed=self._seed_of(index))

    def _seed_of(self, choice: int) -> int:
        if self.seed is None:
            return secrets.randbits(63)
        return (self.seed + choice + (1 << 63)) % (1 << 64) - (1 << 63)


_MOST_ID = (1 << 32) - 1


def _check_biases(biases: tuple[tuple[int, float], ...]) -> None:
    if len(biases) > MAX_BIASES:
        raise RequestError(
            f"logit_bias: {len(biases)} entries, at most {MAX_BIASES} are allowed", param="logit_bias"
        )
    for token, bias in biases:
        _whole("logit_bias", token, 0, _MOST_ID)
        _number("logit_bias", bias, -100.0, 100.0)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}: {shown(value)} is not a whole number", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name}: {shown(value)} is outside [{low}, {high}]", param=name)


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name}: {shown(value)} is not a number", param=name)
    above = value > low if open_low else value >= low
    if not (above and value <= high):  # NaN is neither
        bracket = "(" if open_low else "["
        raise RequestError(f"{name}: {shown(value)} is outside {bracket}{low:g}, {high:g}]", param=name)


@dataclass(frozen=True, slots=True)
class Origin:
    """What logs and traces call a request: its id at the gateway, and the span (W3C `traceparent`) that it is below.

    Either may be empty.
    """

    request_id: str = ""
    traceparent: str = ""


NO_ORIGIN = Origin()


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose behalf: `name` of a key, empty for everybody without one, with `/CLASS` behind it for a class of
    service. Of tenants whose requests wait, one with twice the `share` is given twice the tokens."""

    name: str = ""
    share: int = 1

    @property
    def owner(self) -> str:
        """The key, whatever the class of service."""
        return self.name.partition("/")[0]

    def __post_init__(self) -> None:
        _whole("share", self.share, 1, MAX_SHARE)
        if len(self.name) > MAX_TENANT or not self.name.isprintable():
            raise RequestError(f"tenant: {shown(self.name)} is not a short printable text", param="tenant")


NO_TENANT = Tenant()


class Purpose(StrEnum):
    """Whom a request is computed for: a gateway, which is told its tokens; another node, which wants the blocks of its
    prompt and the row behind it; other nodes, which compute that prompt together with this one."""

    ANSWER = "answer"
    PROMPT = "prompt"
    PART = "part"


# By name, because looking up an enum's attribute is slow where it is done for every token.
ANSWER = Purpose.ANSWER


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to extend. `handle` is its number with whoever submits it; events carry the same one.

    A request that draws tokens needs `params.seed` (`SamplingParams.choices` sees to it). `stop` strings are handled
    where text is, above the engine. `generated` are tokens that it already has, from another node or from before: it
    goes on behind them as if it had never moved (max_tokens, min_tokens, penalties and draws count them), and says
    nothing about them or the prompt again. Of waiting requests the one with the lowest `priority` is first, and the
    highest is preempted first; among those of one priority each `tenant` has its share. Requests find cached blocks of
    those with the same `cache_salt` only. Of the tokens that it finds, `cached_most` were there before, `from_peer` of
    them in another node's cache; another node has computed the others for it (`cached_most` None: it has not). With a
    `row`, which is what the last layer gave for its last token there, the next token is drawn at once. One of another
    `purpose` than an answer ends with its own row, and no logits are computed for it: its one token is 0. Nobody reads
    it here: what it finds counts where it was asked for. `ttft` is the most seconds that its first token should take:
    prompts are split over nodes by it, and nothing else is. `prediction` is what its asker expects as the answer, a
    draft. What it leaves in the cache is evicted last for `retain` seconds. `tiles` are of pictures in its prompt.
    """

    handle: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    generated: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    origin: Origin = NO_ORIGIN
    cached_most: int | None = None
    from_peer: int = 0
    tenant: Tenant = NO_TENANT
    row: bytes = b""
    purpose: Purpose = ANSWER
    ttft: float | None = None
    prediction: tuple[int, ...] = ()
    retain: float = 0.0
    tiles: tuple[PictureTile, ...] = ()

    def __post_init__(self) -> None:
        _whole("priority", self.priority, -MAX_PRIORITY, AHEAD_PRIORITY)
        _number("retain", self.retain, 0.0, MAX_RETAIN)
        if len(self.prediction) > MAX_PREDICTION:
            raise RequestError.about(
                "prediction", f"has {len(self.prediction)} tokens, at most {MAX_PREDICTION} are followed"
            )
        if self.wants_row and self.params.max_tokens != 1:
            raise RequestError("purpose: a row comes with one token; set max_tokens to 1", param="purpose")
        if len(self.cache_salt) > MAX_SALT:
            size = len(self.cache_salt)
            raise RequestError.about("cache_salt", f"has {size} characters, at most {MAX_SALT} are allowed")
        try:
            self.cache_salt.encode()
        except UnicodeEncodeError:
            why = "cache_salt: holds half of a surrogate pair, which is no text"
            raise RequestError(why, param="cache_salt") from None

    @property
    def most_routed(self) -> int:
        """Tokens whose experts may be told."""
        wanted = self.params.return_routed_experts
        return len(self.prompt_ids) + self.params.max_tokens if wanted else 0

    @property
    def ahead(self) -> bool:
        """Whether nobody waits for it: it runs alone, and gives way to whatever else there is."""
        return self.priority == AHEAD_PRIORITY

    @property
    def wants_row(self) -> bool:
        """Whether it is another node's."""
        return self.purpose is not ANSWER


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token and of the best alternatives at its position, natural log."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Predicted(NamedTuple):
    """Of an expected answer: tokens that were right, and others that were verified in vain."""

    accepted: int = 0
    rejected: int = 0


NOT_PREDICTED = Predicted()


def sum_predicted(parts: Iterable[Predicted]) -> Predicted:
    accepted = rejected = 0
    for part in parts:
        accepted, rejected = accepted + part.accepted, rejected + part.rejected
    return Predicted(accepted, rejected) if accepted or rejected else NOT_PREDICTED


# Parameters that can turn out to be impossible while an answer is written.
ASKED = ("grammar", "min_tokens")


@dataclass(slots=True)
class TokenEvent:
    """New tokens of one request. `finish_reason` is set on the last event, `error` only with "error": it begins with a
    name of ASKED where what was asked cannot be done, and else tells of the model. Nobody changes one: it is not frozen
    because that takes 0.9 us more, for each token at both of its ends.

    `pooled`, where it was asked for: the last hidden state of the prompt's last token, which alone sees the whole
    prompt, after the final norm, as a vector of length 1 in little-endian float32 numbers.
    A request's first event at a node has `cached_tokens` of prompt and earlier answer, those of them `found_below` the
    cache, the seconds `queued` until it was planned and, where nothing was generated before, `prompt_logprobs`.
    `routed`, where it was asked for: the experts of tokens, going on where the last event's ended. Of the n tokens that
    prompt and answer have so far, those of the first n - 1 were told.
    `row`, where it was wanted: what the last layer gave for the last token before these, in the model's dtype.
    `purpose` is the request's, `predicted` what became of the tokens of its `prediction` that the step verified.
    """

    handle: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    cached_tokens: int = 0
    error: str | None = None
    pooled: bytes = b""
    row: bytes = b""
    queued: float = field(default=0.0, compare=False)  # of the machine, not of the answer
    purpose: Purpose = ANSWER
    predicted: Predicted = field(default=NOT_PREDICTED, compare=False)
    routed: RoutedExperts | None = None
    found_below: FoundBelow = NONE_BELOW
