"""What a client asked for, as a value that another gateway can read: how to compute it and how to answer.

An attention node keeps its bytes without looking into them. It has the prompts as tokens anyway: they are not among
these bytes.
"""

import hashlib
import json
import secrets
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace

from afserve.control.wire.keeping import MOST_ABOUT, Keep
from afserve.engine.scheduling.request import NO_ORIGIN, Origin
from afserve.errors import ProtocolError, RequestError
from afserve.server.access.accounts import Account
from afserve.server.answers.answering import Watched
from afserve.server.answers.generation import Task
from afserve.server.answers.openai_surface import Reply
from afserve.server.bodies.prepared import Prepared, from_bytes, to_bytes
from afserve.server.metrics.spans import NOWHERE, Span
from afserve.server.replies.chat_reply import ChatReply
from afserve.server.replies.completion_reply import CompletionReply, Echo
from afserve.server.replies.wording import ChunkHeader
from afserve.server.text.kinds import BodyKind
from afserve.tokens.tokenizer import Tokenizer

_PREFIX = {BodyKind.COMPLETION: "cmpl", BodyKind.CHAT: "chatcmpl"}


@dataclass(frozen=True, slots=True)
class Asked:
    """`created` in Unix seconds. `owner` says whose it is without saying the key."""

    id: str
    kind: BodyKind
    created: int
    owner: str
    prepared: Prepared

    @classmethod
    def new(cls, kind: BodyKind, prepared: Prepared, created: int, owner: str) -> "Asked":
        """With a seed, so that wherever a token is drawn, and drawn again, it is the same."""
        own = None if prepared.resume is None else prepared.resume.id
        if prepared.resume is not None and prepared.params.seed is None:
            prepared = replace(prepared, params=replace(prepared.params, seed=secrets.randbits(62)))
        return cls(f"{_PREFIX[kind]}-{own or secrets.token_hex(16)}", kind, created, owner, prepared)

    @property
    def kept_seconds(self) -> float:
        """How long it is kept without a connection."""
        return 0.0 if self.prepared.resume is None else self.prepared.resume.seconds

    def seconds_left(self, now: float) -> float | None:
        """Of its own deadline, at this Unix time; None is without one."""
        deadline = self.prepared.scheduling.deadline
        return None if deadline is None else max(0.0, deadline - max(0.0, now - self.created))

    @property
    def exact(self) -> bool:
        """Whether its tokens are read one by one: reasoning is counted by the pieces that it comes in."""
        reading = self.prepared.reading
        return reading is not None and reading.thinks != ""

    @property
    def choices(self) -> int:
        return len(self.prepared.prompts) * self.prepared.params.n

    def task(
        self,
        arrived: float,
        account: Account | None = None,
        span: Span = NOWHERE,
        origin: Origin = NO_ORIGIN,
        watched: Watched | None = None,
    ) -> Task:
        return Task(self.id, self.prepared, arrived, account or Account(), span, origin, watched)

    def watched(self, owner: str) -> Watched:
        """For this owner, an account's, who asks about it while it runs."""
        asked = self.prepared
        return Watched(
            self.id,
            owner,
            self.created,
            asked.model,
            self.choices,
            stream=asked.stream is not None,
            prompt_tokens=sum(map(len, asked.prompts)),
        )

    def reply(self, tokenizer: Tokenizer) -> Reply:
        asked = self.prepared
        header = ChunkHeader(self.id, self.created, asked.model, asked.scheduling.tier)
        if self.kind is BodyKind.CHAT:
            return ChatReply(
                header, tokenizer, asked.logprobs, asked.reading, joined=asked.resume is not None
            )
        return CompletionReply(
            header,
            tokenizer,
            asked.params.n,
            asked.logprobs,
            None if asked.echo is None else Echo(asked.echo, asked.prompts),
            prompts=asked.prompts,
            skip_special_tokens=asked.skip_special_tokens,
        )

    # ---- for another gateway

    def keeps(self) -> list[Keep]:
        """What to leave with each choice. Raises RequestError where it is too large."""
        about = self._about()
        if len(about) > MOST_ABOUT:
            raise RequestError.about(
                "resume",
                f"this request has {len(about)} bytes beside its prompt's tokens, at most {MOST_ABOUT} can be kept; "
                "send it with fewer prompts, fewer tools, a shorter format, without echo, or without resume",
            )
        return [Keep(self.id, i, self.choices, self.kept_seconds, about) for i in range(self.choices)]

    def _about(self) -> bytes:
        head = {
            "id": self.id,
            "kind": int(self.kind),
            "created": self.created,
            "owner": self.owner,
            "prompts": len(self.prepared.prompts),
        }
        return json.dumps(head).encode() + b"\n" + to_bytes(replace(self.prepared, prompts=(), written=None))

    @classmethod
    def restored(cls, about: bytes, prompt_of: Mapping[int, tuple[int, ...]]) -> "Asked":
        """`prompt_of` has the tokens by choice. Raises ProtocolError where a prompt of it is nowhere."""
        line, _, words = about.partition(b"\n")
        head, prepared = json.loads(line), from_bytes(words)
        assert isinstance(prepared, Prepared)
        found = {choice // prepared.params.n: array("i", ids) for choice, ids in prompt_of.items()}
        if len(found) != head["prompts"]:
            raise ProtocolError(f"{head['id']}: {len(found)} of its {head['prompts']} prompts were kept")
        prompts = tuple(found[p] for p in range(head["prompts"]))
        prepared = replace(prepared, prompts=prompts)
        return cls(head["id"], BodyKind(head["kind"]), head["created"], head["owner"], prepared)


def owner_of(authorization: str) -> str:
    """Whoever sends the same key; where none is asked for, everyone who knows the request's id."""
    _, _, key = authorization.partition(" ")
    return hashlib.sha256(key.strip().encode()).hexdigest()
