"""The open requests of a gateway: what each asked for, on which node it is, what it has got so far, and who waits.

A request ends with an event that has a finish_reason or with an error; nothing is ever dropped silently. Prompt,
parameters and tokens so far are enough to go on elsewhere. Each time it is given to a node it gets a number of its own,
so that whatever an earlier one still says is nobody's. All of it runs in one event loop and knows no addresses.
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from afserve.comm.kv.source import KvSource
from afserve.control.affinity import Chain, OpenPrompts
from afserve.control.wire.keeping import Keep
from afserve.control.wire.request_values import Submit, first_request, is_of_life
from afserve.engine.scheduling.request import GenerationRequest, Tenant, TokenEvent
from afserve.errors import AfserveError
from afserve.member import Life

# Is told an event while its reader waits for it, and says whether it has dealt with it.
Taker = Callable[[TokenEvent], bool]
TAKEN_AT_ONCE = 1024  # events of one message that takers are asked for, 15 ms; the others wake their readers


class Request:
    """One open request. `number` is its handle at `home`, the node that computes it; without one it waits.

    `missing` tokens of its prompt are to be computed there before its first token comes, as far as is known here.
    `chain` says which prompts there begin as its own does.
    `last` is where it was before. It waits since `since`, and for its next attempt until `again`. With `keep` it may
    outlive this gateway. `taker` spares its reader a turn of the event loop for each token that it takes.
    """

    __slots__ = (
        "_items",
        "_reader",
        "again",
        "asked",
        "chain",
        "finished",
        "generated",
        "home",
        "keep",
        "last",
        "missing",
        "number",
        "since",
        "taker",
    )

    def __init__(
        self, asked: GenerationRequest, keep: Keep | None = None, taker: Taker | None = None
    ) -> None:
        self.asked, self.keep, self.taker = asked, keep, taker
        self.number = self.missing = 0
        self.chain: Chain = ()
        self.home: Life | None = None
        self.last: Life | None = None
        self.since = self.again = 0.0
        self.generated: list[int] = []
        self.finished = False
        self._items: deque[TokenEvent | AfserveError] = deque()
        self._reader: asyncio.Future[None] | None = None  # it waits for the next item

    def put(self, item: TokenEvent | AfserveError, *, woken: bool = False) -> None:
        """What comes after the end is of nobody's interest. With `woken` the reader gets it in any case."""
        if self.finished:
            return
        if isinstance(item, AfserveError):
            self.finished = True
        else:
            self.generated.extend(item.token_ids)
            self.finished = item.finish_reason is not None
            if not (woken or self.finished) and self._taken(item):
                return
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _taken(self, event: TokenEvent) -> bool:
        """Only while the reader waits: then it has dealt with everything before."""
        reader = self._reader
        return (
            self.taker is not None
            and reader is not None
            and not reader.done()
            and not self._items
            and self.taker(event)
        )

    async def get(self) -> TokenEvent:
        """The next event that was not taken, for its one reader. Raises the error that ended the request."""
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        item = self._items.popleft()
        if isinstance(item, AfserveError):
            raise item
        return item


class Requests:
    """All open requests of a gateway, by number where they have a home. An event for an unknown number is ignored.

    One that has ended and is still kept at its home rests: it is no load, and nothing of it is told any more.
    `read_tokens` of prompts had their first token, and `generated_tokens` came, since the beginning.
    """

    def __init__(self, index: int = 0, generation: int = 0) -> None:
        self._life = index, generation
        self._placed: dict[int, Request] = {}
        self._resting: dict[int, Request] = {}
        self._waiting: dict[Request, None] = {}  # the one that has waited longest first
        self._load: Counter[Life] = Counter()
        self._ahead: Counter[Life] = Counter()  # of those, what nobody waits for
        self._pending: Counter[Life] = Counter()
        self._prompts: defaultdict[Life, OpenPrompts] = defaultdict(OpenPrompts)  # none that are ahead
        self._busy: dict[Life, float] = {}  # since when it has requests
        self._unread: dict[
            Request, None
        ] = {}  # placed and without a token, the one placed first before others
        self._asked_by: Counter[Tenant] = Counter()  # tokens of those prompts
        self.read_tokens = self.generated_tokens = 0
        self._next = first_request(index, generation)

    def __len__(self) -> int:
        return len(self._placed) + len(self._waiting)

    def open(
        self, asked: GenerationRequest, now: float, keep: Keep | None = None, taker: Taker | None = None
    ) -> Request:
        """It waits for a home."""
        request = Request(asked, keep, taker)
        request.since = now
        self._waiting[request] = None
        return request

    def place(
        self,
        request: Request,
        home: Life,
        now: float,
        kv_from: KvSource | None = None,
        missing: int = 0,
        chain: Chain = (),
    ) -> Submit:
        """What to tell its new home, which has to compute `missing` tokens of it first. Without a `chain` nothing of
        its prompt is taken for what others there have too."""
        del self._waiting[request]
        ahead = request.asked.ahead
        missing = 0 if ahead else missing  # nobody's turn is behind it
        request.missing = missing
        self._pending[home] += missing
        if missing:
            self._unread[request] = None
            self._asked_by[request.asked.tenant] += missing
        request.number, request.home, request.chain = self._next, home, chain
        self._next += 1
        self._placed[request.number] = request
        self._load[home] += 1
        self._hold(request, home)
        self._ahead[home] += ahead
        self._busy.setdefault(home, now)
        generated = tuple(request.generated)
        asked = replace(request.asked, handle=request.number, generated=generated)
        return Submit(asked, kv_from, request.keep)

    def adopt(self, asked: GenerationRequest, keep: Keep, number: int, home: Life, now: float) -> Request:
        """One that a node keeps under the number that another gateway gave it."""
        request = Request(asked, keep)
        request.number, request.home = number, home
        self._placed[number] = request
        self._load[home] += 1
        self._hold(request, home)
        self._busy.setdefault(home, now)
        return request

    def _hold(self, request: Request, home: Life) -> None:
        """One that is ahead gives its room up to whoever comes."""
        if not request.asked.ahead:
            self._prompts[home].add(request.chain, len(request.asked.prompt_ids))

    def rest(self, request: Request) -> None:
        """It has ended, and its home keeps it until it is closed."""
        home = request.home
        self._leave(request)
        request.home = home
        self._resting[request.number] = request

    def rests(self, request: Request) -> bool:
        return self._resting.get(request.number) is request

    @property
    def resting(self) -> list[Request]:
        return list(self._resting.values())

    def is_mine(self, number: int) -> bool:
        """Whether this life of this gateway gave it out."""
        return is_of_life(number, *self._life)

    def unplace(self, request: Request, since: float) -> None:
        """It leaves its home and waits for another, since this moment."""
        self._leave(request)
        request.since = since
        self._waiting[request] = None

    def close(self, request: Request) -> None:
        """May be said again."""
        self._waiting.pop(request, None)
        if self._resting.pop(request.number, None) is not None:
            request.home = None
        elif request.home is not None:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        assert request.home is not None
        self._began(request, request.home)
        del self._placed[request.number]
        self._load[request.home] -= 1
        if not request.asked.ahead:
            self._prompts[request.home].remove(request.chain, len(request.asked.prompt_ids))
        self._ahead[request.home] -= request.asked.ahead
        if not self._load[request.home]:
            home = request.home
            del self._load[home], self._ahead[home], self._busy[home], self._pending[home]
            self._prompts.pop(home, None)
        request.last, request.home = request.home, None

    def _began(self, request: Request, home: Life) -> None:
        """Its home computes its prompt no more."""
        self._pending[home] -= request.missing
        if request.missing:
            tenant = request.asked.tenant
            self._asked_by[tenant] -= request.missing
            if not self._asked_by[tenant]:
                del self._asked_by[tenant]
        self._unread.pop(request, None)
        request.missing = 0

    def homes(self) -> list[Life]:
        """Those that have requests."""
        return list(self._load)

    def busy_since(self, home: Life) -> float:
        """When one of `homes()` got the first request since it had none."""
        return self._busy[home]

    def requests_at(self, home: Life) -> list[Request]:
        return [request for request in self._placed.values() if request.home == home]

    def load(self, home: Life) -> int:
        """Requests there that somebody waits for."""
        return self._load[home] - self._ahead[home]

    def pending(self, home: Life) -> int:
        """Tokens of prompts that are to be computed there."""
        return self._pending[home]

    def prompt_tokens(self, home: Life, beside: Chain = ()) -> int:
        """What the prompts of all requests there take of its cache once they are computed, equal beginnings once, and
        without what they begin with as the prompt of `beside` does. What is computed ahead takes nothing."""
        prompts = self._prompts.get(home)
        return 0 if prompts is None else prompts.tokens - prompts.shared(beside)

    @property
    def unread(self) -> int:
        """Requests whose prompt is to be computed."""
        return len(self._unread) + len(self._waiting)

    def before(self, tenant: Tenant, tokens: int) -> int:
        """Of the prompts that wait, the tokens that are computed before `tokens` more of this tenant: of each of its
        own at most as many, as `engine.scheduling.turns` has it, and of each other tenant at most its share beside
        them."""
        asked = Counter(self._asked_by)
        for one in self._waiting:
            asked[one.asked.tenant] += len(one.asked.prompt_ids)
        asked.pop(tenant, None)
        own = [one.missing for one in self._unread if one.asked.tenant == tenant]
        own += [len(one.asked.prompt_ids) for one in self._waiting if one.asked.tenant == tenant]
        mine = sum(min(tokens, theirs) for theirs in own)
        turns = (mine + tokens) / tenant.share
        return mine + sum(min(theirs, round(turns * other.share)) for other, theirs in asked.items())

    @property
    def running(self) -> int:
        """Requests that have a token, as far as somebody waits for them."""
        return len(self._placed) - len(self._unread) - self._ahead.total()

    def waited(self, now: float) -> float:
        """Seconds that one of those without a token has waited for it, the longest."""
        first = [next(iter(found)) for found in (self._unread, self._waiting) if found]
        return max((now - one.since for one in first), default=0.0)

    def find(self, number: int) -> Request | None:
        """One that is computed."""
        return self._placed.get(number)

    def kept(self, number: int) -> Request | None:
        """One that its home keeps, whether it has ended or not."""
        return self._placed.get(number) or self._resting.get(number)

    @property
    def waiting(self) -> list[Request]:
        """Those without a home that have not ended, the one that has waited longest first."""
        return [request for request in self._waiting if not request.finished]

    def deliver(self, events: Iterable[TokenEvent]) -> tuple[int, ...]:
        """Returns the numbers that these events end."""
        ended = []
        for number, event in enumerate(events):
            if event.finish_reason is not None:
                ended.append(event.handle)
            if (request := self._placed.get(event.handle)) is not None:
                self.generated_tokens += len(event.token_ids)
                if request.missing and request.home is not None:
                    self.read_tokens += request.missing
                    self._began(request, request.home)
                request.put(event, woken=number >= TAKEN_AT_ONCE)
        return tuple(ended)

    def fail(self, error: AfserveError) -> None:
        """End all of them with this reason."""
        for request in (*self._placed.values(), *self._waiting):
            request.put(error)
