"""Token ids of answers as they were generated, for the prompts of the turns that follow.

A model may spell the same text with other tokens than its tokenizer does. Rendered and tokenised again, such an answer
would be another beginning than the one in the cache. Here its own ids are put back: the text stays what it is. Kept is
only what differs, by the hash of the conversation up to its end, no more than some tokens. Knows no engine.
"""

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from afserve.tokens.tokenizer import Tokenizer

MOST_ENDS = 4096  # places of a prompt where an answer may end
MOST_ANSWER = 1 << 14  # tokens of one that is kept
MOST_TAIL = 256  # tokens between the last special one and the end of a prompt, which answers are read with
_ENTRY = 64  # what an answer takes beside its ids, in tokens' memory: many short ones are bounded too
_Key = bytes


@dataclass(frozen=True, slots=True)
class _Kept:
    """`ids` stand in the prompt from token `start` on, as far as where the answer ends."""

    start: int
    ids: "array[int]"


class AnswerTokens:
    """Of one model. Threads may keep answers while others look for them."""

    def __init__(self, tokenizer: Tokenizer, most_tokens: int) -> None:
        self._tokenizer, self._most = tokenizer, most_tokens
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Answers whose ids are kept."""
        return len(self._kept)

    def takes(self, answer: Sequence[int]) -> bool:
        """Whether an answer may be kept: it is not too long, for this tokenizer neither."""
        return 0 < len(answer) <= min(MOST_ANSWER, self._most) and self._tokenizer.is_quick

    def as_generated(self, prompt: "array[int]", salt: str) -> "array[int]":
        """The prompt with the ids of earlier answers, whose text is the same; itself where none is known."""
        if not self._kept:
            return prompt
        with self._lock:
            found = self._found(prompt, salt)
        parts, at = array("i"), 0
        for end, kept in found:
            parts += prompt[at : kept.start] + kept.ids
            at = end
        return parts + prompt[at:] if found else prompt

    def _found(self, prompt: "array[int]", salt: str) -> list[tuple[int, _Kept]]:
        """Where answers end, in order. Of two that begin in one place the longer one counts."""
        found: list[tuple[int, _Kept]] = []
        for end, key in self._ends(prompt, salt):
            if (kept := self._known(key)) is None:
                continue
            while found and found[-1][0] > kept.start:
                found.pop()
            found.append((end, kept))
        return found

    def keep_answer(self, prompt: "array[int]", answer: Sequence[int], salt: str) -> None:
        """`prompt` is as the tokenizer writes it, `answer` what was generated behind it, without the token that ended
        it."""
        start = self._last_special(prompt)
        own = prompt[start:] + array("i", answer)
        text = self._tokenizer.decode(own, skip_special_tokens=False)
        written = array("i", self._tokenizer.encode(text, add_special_tokens=False))
        if written == own or len(own) > self._most:
            return
        key = self._digest(salt, prompt[:start] + written)
        with self._lock:
            self._forget(key)
            self._kept[key] = _Kept(start, own)
            self._tokens += len(own) + _ENTRY
            while self._tokens > self._most:
                self._forget(next(iter(self._kept)))

    def _last_special(self, prompt: Sequence[int]) -> int:
        """Where the text begins whose tokens an answer may change, the end of the prompt where that is far away."""
        special = self._tokenizer.special_ids
        for back in range(1, min(len(prompt), MOST_TAIL) + 1):
            if prompt[-back] in special:
                return len(prompt) - back
        return len(prompt)

    def _ends(self, prompt: "array[int]", salt: str) -> list[tuple[int, _Key]]:
        """Places of special tokens, each with the name of what stands before it."""
        special = self._tokenizer.special_ids
        places = [at for at, token in enumerate(prompt) if token in special][:MOST_ENDS]
        digest, told, begun = _begin(salt), memoryview(prompt), 0
        found: list[tuple[int, _Key]] = []
        for at in places:
            digest.update(told[begun:at])
            begun = at
            found.append((at, digest.copy().digest()))
        return found

    def _digest(self, salt: str, ids: "array[int]") -> _Key:
        digest = _begin(salt)
        digest.update(memoryview(ids))
        return digest.digest()

    def _known(self, key: _Key) -> _Kept | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def _forget(self, key: _Key) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self._tokens -= len(kept.ids) + _ENTRY


def _begin(salt: str) -> "hashlib.blake2b":
    return hashlib.blake2b(len(salt).to_bytes(4, "big") + salt.encode(), digest_size=16)
