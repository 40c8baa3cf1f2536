"""What a step's tokens are to those that asked for them: values for whoever sends them on. It knows no tensors."""

from collections.abc import Iterator

from afserve.engine.scheduling.found_below import NONE_BELOW
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent, TokenLogprob
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.step_plan import PROMPT, Finished, StepPlan
from afserve.engine.step.routed_rows import take_routed
from afserve.engine.verify import Run


def leave_queue(plan: StepPlan, now: float) -> None:
    """For those whose first step this is. Prompts stand at the end."""
    for chunk in reversed(plan.chunks):
        if chunk.kind is not PROMPT:
            return
        if chunk.sequence.planned is None:
            chunk.sequence.planned = now


def token_events(request: GenerationRequest, run: Run) -> Iterator[TokenEvent]:
    """Of tokens that are neither the first ones of an answer nor its last."""
    return (TokenEvent(request.handle, (token,), purpose=request.purpose) for token in run)


def run_event(
    sequence: Sequence, run: Run, logprobs: tuple[TokenLogprob, ...], done: Finished | None, before: int
) -> TokenEvent:
    """`before` tokens of the answer were there before this run."""
    first = before == len(sequence.request.generated)
    queued = sequence.planned - sequence.arrived if first and sequence.planned is not None else 0.0
    return TokenEvent(
        handle=sequence.request.handle,
        token_ids=run,
        finish_reason=done.reason if done else None,
        stop_token_id=done.stop_token_id if done else None,
        logprobs=logprobs,
        prompt_logprobs=() if before else tuple(sequence.prompt_logprobs),
        cached_tokens=sequence.cached_tokens if first else 0,
        found_below=sequence.found_below if first else NONE_BELOW,
        queued=queued,
        purpose=sequence.request.purpose,
        routed=take_routed(sequence) if sequence.routed else None,
    )
