"""One sequence's token events as pieces of text: where detokenizing, stop strings and min_tokens meet.

Values in, values out: no HTTP, no clock, no tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from afserve.engine.scheduling.request import (
    ASKED,
    NOT_PREDICTED,
    Predicted,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)
from afserve.engine.scheduling.routed_experts import RoutedExperts
from afserve.errors import CapacityError, ModelError, RequestError
from afserve.tokens.detokenizer import StopStrings, detokenizer
from afserve.tokens.tokenizer import Tokenizer


@dataclass(slots=True)
class TextPiece:
    """New text of one choice. `tokens` counts generated tokens, also those that show no text. Nobody changes one.

    `old`: the client has it already, from an earlier connection. `stop`: the stop string that ended the choice.
    `routed`: experts of tokens, which go on where those of the piece before end.
    """

    text: str
    tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    cached_tokens: int = 0
    finish_reason: str | None = None
    old: bool = False
    stop: str | None = None
    predicted: Predicted = NOT_PREDICTED
    routed: RoutedExperts | None = None


class ChoiceDecoder:
    """Feed it every event of a sequence; stop, and close the engine's iterator, once a piece has a reason.

    `prompt` is what the sequence goes on with, `echoes` that the client is told its text too.
    """

    __slots__ = ("_detokenizer", "_keep_stop_token", "_min_tokens", "_stops", "_tokens", "_watches")

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        echoes: bool = False,
    ) -> None:
        self._detokenizer = detokenizer(
            tokenizer, prompt, skip_special_tokens=skip_special_tokens, echoes=echoes
        )
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._watches = bool(params.stop)
        self._keep_stop_token = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._tokens = 0

    def decode_event(self, event: TokenEvent) -> TextPiece:
        if event.finish_reason is None and not self._watches and len(event.token_ids) == 1:
            self._tokens += 1
            text = self._detokenizer.push(event.token_ids[0])
            cached, predicted = event.cached_tokens, event.predicted
            return TextPiece(
                text,
                1,
                event.logprobs,
                event.prompt_logprobs,
                cached,
                predicted=predicted,
                routed=event.routed,
            )
        raise_failure(event)
        text = ""
        for i, token_id in enumerate(event.token_ids):
            self._tokens += 1
            if not self._is_stop_token(event, i):
                text += self._pass(self._detokenizer.push(token_id))
            if self._stops.matched is not None:
                return self._piece(event, text, i + 1, "stop")
        reason: str | None = event.finish_reason
        if reason is not None:
            text += self._pass(self._detokenizer.flush()) + self._stops.flush()
            reason = "stop" if self._stops.matched is not None else reason
        return self._piece(event, text, len(event.token_ids), reason)

    def _is_stop_token(self, event: TokenEvent, i: int) -> bool:
        last = i == len(event.token_ids) - 1
        return last and event.token_ids[i] == event.stop_token_id and not self._keep_stop_token

    def _pass(self, text: str) -> str:
        return text if self._tokens < self._min_tokens else self._stops.push(text)

    def _piece(self, event: TokenEvent, text: str, tokens: int, reason: str | None) -> TextPiece:
        routed, cut = event.routed, len(event.token_ids) - tokens
        if routed is not None and cut:
            routed = routed.first(routed.tokens - cut)
        return TextPiece(
            text,
            tokens,
            event.logprobs[:tokens],
            event.prompt_logprobs,
            event.cached_tokens,
            finish_reason=reason,
            stop=self._stops.matched,
            predicted=event.predicted,
            routed=routed,
        )


def raise_failure(event: TokenEvent) -> None:
    """What the engine says instead of tokens: RequestError where the request asked for it, else ModelError."""
    if event.finish_reason == "error":
        why = event.error or "the engine gave up on this request without a reason; try again"
        param = why.partition(":")[0]
        if param in ASKED:
            raise RequestError(why, param=param)
        raise ModelError(why)
    if event.finish_reason == "cancelled":
        raise CapacityError("the engine cancelled this request; try again")
