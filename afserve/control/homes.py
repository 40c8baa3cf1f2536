"""Where each open request of a gateway is computed: it is given to an attention node, and to another when that is lost.

A node is lost when the controller names it no more, or when its stream has been away for longer than a grace. One that
drains keeps its requests until another takes them. Who finds no node waits for one, until a deadline. What happens to
streams comes in, what nodes are to be told goes out by them; it opens nothing and waits for nothing.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from afserve.adviser import Adviser
from afserve.clock import Clock
from afserve.control.admission import Admission, Objectives
from afserve.control.attendance import Attendance, Attending
from afserve.control.home_choice import HomeChoice
from afserve.control.moves import Moves
from afserve.control.questions import Asking, GivenAwayError, OpenQuestions, all_choices
from afserve.control.requests import Request, Requests, Taker
from afserve.control.wire.cache_values import AskCache, KeptCache
from afserve.control.wire.desired import SILENCE_SECONDS, Deployment
from afserve.control.wire.keeping import Claim, Claimed, Given, Halt, Keep, KeptAnswer
from afserve.control.wire.request_values import (
    Acknowledge,
    Cancel,
    FromAttention,
    Held,
    Prefixes,
    Refused,
    Resume,
    ToAttention,
    Tokens,
)
from afserve.control.wire.values import AttentionNodes, Unheard
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent
from afserve.errors import AfserveError, OverloadedError, PeerError, PeerLost, ProtocolError, UnavailableError
from afserve.member import Life

log = logging.getLogger("afserve.gateway")
CLAIM_SECONDS = 2.0  # for attention nodes to say what they keep: a step of theirs may take long
AGAIN_SECONDS = 0.2  # from a full node's refusal of a moved request to the next attempt


@dataclass(frozen=True, slots=True)
class HomeRules:
    """Seconds: what a broken stream may take to come back, how long a request waits for a node, and a node that has
    requests may say nothing. `block_size` in tokens: prompts whose first blocks are equal share a node. `copies` nodes
    have copies of another one's KV. Each has room for `cache_tokens`; 0 where that is not known."""

    block_size: int = 16
    grace: float = 1.0
    deadline: float = 30.0
    copies: int = 0
    silence: float = SILENCE_SECONDS
    cache_tokens: int = 0


def home_rules(deployment: Deployment) -> HomeRules:
    engine = deployment.engine
    return HomeRules(
        engine.block_size,
        engine.stream_grace,
        engine.loss_deadline,
        engine.kv_copies,
        deployment.silence,
        engine.kv_blocks * engine.block_size,
    )


class Homes:
    """Calls come from one event loop. `moves` has what became of requests that went on elsewhere."""

    def __init__(self, requests: Requests, rules: HomeRules, clock: Clock) -> None:
        self.requests = requests
        self.attendance = Attendance(rules.grace)
        self.moves, self._rules, self._clock = Moves(), rules, clock
        self._choice = HomeChoice(
            requests, self.attendance, rules.block_size, rules.copies, rules.cache_tokens
        )
        self._prompts = self._choice.prompts
        self.admission = Admission(requests)
        self._heard: dict[Life, float] = {}  # when it last said something
        self._claims = OpenQuestions[KeptAnswer]()
        self._cache_questions = OpenQuestions[KeptCache]()
        # What only advises: an exception there must not end a request.
        self._admission_advice = Adviser("predicting when requests have their tokens", OverloadedError)
        self._moves_advice = Adviser("counting what moved requests wait")

    # ---- what clients want

    def admit(self, prompts: Sequence[Sequence[int]], wanted: Objectives) -> None:
        """Raises OverloadedError where a request of these prompts would be too late for what it asks for."""
        now = self._clock.now()
        self._admission_advice.ask(now, lambda: self._admit(prompts, wanted, now), None)

    def _admit(self, prompts: Sequence[Sequence[int]], wanted: Objectives, now: float) -> None:
        self.admission.check(self._choice.missing(prompts, wanted.cache_salt), wanted, now)

    def open(self, asked: GenerationRequest, keep: Keep | None = None, taker: Taker | None = None) -> Request:
        request = self.requests.open(asked, self._clock.now(), keep, taker)
        self._place_waiting()
        return request

    def close(self, request: Request) -> None:
        """Its client has the end of it, or has gone: then it is cancelled wherever it is."""
        if self.requests.rests(request):
            self._say(request, Acknowledge((request.number,)))
        elif not request.finished:
            self._cancel(request)
        self.leave(request)

    def leave(self, request: Request) -> None:
        """Nothing is said of it: where it is kept, another gateway may ask for it."""
        self._prompts.forget_prompt(request)
        self.requests.close(request)
        self.moves.closed(request)

    def halt(self, request: Request) -> None:
        """It needs no more tokens; its home keeps those that there are."""
        if self.requests.rests(request) or request.finished:
            return
        request.finished = True
        self.moves.closed(request)
        if request.home is not None:
            self._say(request, Halt(request.number))
            self.requests.rest(request)

    # ---- requests that other gateways began

    async def find(self, id: str, *, take: bool) -> Asking[KeptAnswer]:
        """What attention nodes keep of a request; with `take` it is this gateway's, and `adopt` is called for each."""
        streams = self.attendance.open_streams()
        return await self._claims.ask(
            lambda number: Claim(number, id, take), streams, CLAIM_SECONDS, all_choices
        )

    async def ask_caches(
        self, owner: str | None, *, unpin: bool, prompt: Sequence[int] = (), salt: str = ""
    ) -> Asking[KeptCache]:
        """What attention nodes keep for this owner, for anybody where it is None; with `unpin` no longer, of this
        prompt alone where it has tokens."""
        return await self._cache_questions.ask(
            lambda number: AskCache(number, owner or "", owner is None, unpin, tuple(prompt), salt),
            self.attendance.open_streams(),
            CLAIM_SECONDS,
        )

    def adopt(self, home: Life, kept: KeptAnswer, asked: GenerationRequest) -> Request:
        """From its first token on. One that lacks log-probabilities or experts is computed once more, the same."""
        params = asked.params
        scored = params.logprobs is not None or params.prompt_logprobs is not None
        stream = self.attendance.stream(home)
        if stream is None:
            return self.open(asked, kept.keep)
        if (scored or params.return_routed_experts) and kept.bare:
            stream.send(Cancel(kept.request))
            return self.open(asked, kept.keep)
        request = self.requests.adopt(asked, kept.keep, kept.request, home, self._clock.now())
        stream.send(Resume(kept.request, 0))
        return request

    # ---- what the controller says

    def update_nodes(self, value: AttentionNodes) -> None:
        self.attendance.update_peers(value)
        self._review()

    # ---- what attention nodes do

    def entered(self, stream: Attending, held: Sequence[Held]) -> None:
        """Raises RendezvousError where a later life of this node is known."""
        self.attendance.entered(stream)
        self._heard[stream.life] = self._clock.now()
        numbers = {one.request for one in held}
        for one in held:
            if (answer := self._answer(one, stream.life)) is not None:
                stream.send(answer)
        lost = [one for one in self.requests.requests_at(stream.life) if one.number not in numbers]
        self._move(lost, "stream", f"{stream.life} came back without them")
        self._review()

    def _answer(self, held: Held, life: Life) -> Resume | Cancel | Halt | None:
        """None leaves it there, for whichever gateway asks for it."""
        request = self.requests.kept(held.request)
        if request is None or request.home != life:
            return None if held.kept and not self.requests.is_mine(held.request) else Cancel(held.request)
        if self.requests.rests(request):
            return Halt(held.request)
        return Cancel(held.request) if request.finished else Resume(held.request, len(request.generated))

    def left(self, stream: Attending) -> None:
        self._claims.left(stream)
        self._cache_questions.left(stream)
        self.attendance.note_left(stream, self._clock.now())
        if self.attendance.stream(stream.life) is None:
            self._heard.pop(stream.life, None)

    def heard(self, stream: Attending, value: FromAttention) -> None:
        """Raises ProtocolError for what no attention node says. What a stream says whose place is taken is dropped."""
        if not self.attendance.is_present(stream):
            return
        self._heard[stream.life] = self._clock.now()
        match value:
            case Tokens(events):
                if self.moves.moving or self._prompts.any_open:
                    self._moves_advice.ask(self._clock.now(), lambda: self._note_arrival(events), None)
                ended = self.requests.deliver(events)
            case Refused(number, error):
                self._refused(number, error)
                ended = (number,)
            case Claimed():
                self._claims.heard(stream, value.query, value.answers)
                return
            case KeptCache():
                self._cache_questions.heard(stream, value.query, (value,))
                return
            case Given(numbers):
                self._given(numbers)
                return
            case Prefixes():
                self._choice.heard(stream.life.index, value, self._clock.now())
                return
            case _:
                raise ProtocolError(f"an attention node does not say {type(value).__name__} to a gateway")
        if over := self._over(ended):
            stream.send(Acknowledge(over))

    def _over(self, ended: Sequence[int]) -> tuple[int, ...]:
        """Those that their home may forget; of the others, the end is kept there."""
        kept = [r for number in ended if (r := self.requests.find(number)) is not None and r.keep is not None]
        for request in kept:
            if request.finished:
                self.requests.rest(request)
        resting = {request.number for request in kept}
        return tuple(number for number in ended if number not in resting)

    def _given(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (request := self.requests.kept(number)) is not None:
                self.leave(request)
                request.put(GivenAwayError())

    def _note_arrival(self, events: Sequence[TokenEvent]) -> None:
        now = self._clock.now()
        for event in events:
            if (request := self.requests.find(event.handle)) is not None:
                self.moves.came(request, now)
                self._prompts.forget_prompt(request)

    def _refused(self, number: int, error: AfserveError) -> None:
        """A request that was taken in once is not refused later because another node is full."""
        request = self.requests.find(number)
        if request is None:
            return
        if isinstance(error, PeerError):
            self._move([request], "stream", error.message)
            self._place_waiting()
        elif isinstance(error, OverloadedError) and request.last is not None:
            self.requests.unplace(request, request.since)
            request.again = self._clock.now() + AGAIN_SECONDS
        else:
            request.put(error)

    # ---- what time brings

    @property
    def restless(self) -> bool:
        """Whether `tick` has anything to look after."""
        return self.attendance.waited_for or bool(self.requests.waiting)

    def check_time(self) -> None:
        """Several times a second while `restless`."""
        now = self._clock.now()
        self._review()
        self._admission_advice.ask(now, lambda: self.admission.sample(now), None)
        for request in self.requests.waiting:
            if now - request.since >= self._rules.deadline:
                request.put(self._too_late(request))
        self.attendance.forget_streams(now)

    def _too_late(self, request: Request) -> AfserveError:
        waited = f"no attention node took the request over within {self._rules.deadline:.0f} s"
        if request.last is not None and self.attendance.refusing:
            return UnavailableError(f"{request.last} was lost, and {waited}; try again later")
        if request.last is not None:
            return PeerLost(request.last.node, f"this node left a request, and {waited}")
        return UnavailableError(f"{waited}; try again later")

    def unheard(self) -> list[Unheard]:
        """Nodes that have requests, and of which nothing comes. It may be a long prompt, or a cut network."""
        now, found = self._clock.now(), []
        for home in self.requests.homes():
            seconds = now - max(self._heard.get(home, now), self.requests.busy_since(home))
            if seconds >= self._rules.silence:
                found.append(Unheard(home, seconds))
        return found

    # ---- moving

    def _review(self) -> None:
        """Requests leave the nodes that are lost, and those that drain where another takes them."""
        now = self._clock.now()
        for home in self.requests.homes():
            if why := self.attendance.why_lost(home, now):
                self._move(self.requests.requests_at(home), "lost", f"{home}: {why}")
            elif self.attendance.is_draining(home) and self.attendance.usable():
                self._move(self.requests.requests_at(home), "drained", f"{home} is drained")
        for request in self.requests.resting:
            assert request.home is not None, "it rests somewhere"
            if self.attendance.is_draining(request.home) or self.attendance.why_lost(request.home, now):
                self._say(request, Acknowledge((request.number,)))
                self.requests.close(request)  # what it has got so far is here as well
        self._place_waiting()

    def _move(self, requests: list[Request], cause: str, why: str) -> None:
        """They wait for another home from now on; one that has ended already only waits for its client."""
        moving, now = [request for request in requests if not request.finished], self._clock.now()
        for request in moving:
            self._cancel(request, parts=True)
            if request.home is not None:
                self.moves.moved(request, request.home, cause, now)
            self.requests.unplace(request, now)
        if moving:
            log.warning("%s; requests that go on elsewhere: %d", why, len(moving))

    def _cancel(self, request: Request, *, parts: bool = False) -> None:
        self._say(request, Cancel(request.number, parts))

    def _say(self, request: Request, value: ToAttention) -> None:
        """To its home, where it has one that is there."""
        if request.home is not None and (stream := self.attendance.stream(request.home)) is not None:
            stream.send(value)

    def _place_waiting(self) -> None:
        usable = self.attendance.decoders()
        waiting = self.requests.waiting if usable else []
        now = self._clock.now() if waiting else 0.0
        for request in waiting:
            if now >= request.again:
                self._place(request, usable)

    def _place(self, request: Request, usable: list[Life]) -> None:
        now = self._clock.now()
        choice = self._choice.choose(request, usable, now)
        stream = self.attendance.stream(choice.home)
        assert stream is not None, "a usable node has a stream"
        submit = self.requests.place(request, choice.home, now, choice.source, choice.missing, choice.chain)
        stream.send(submit)
