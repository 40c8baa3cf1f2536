"""The grammars of running requests: compiled beside the engine's thread, followed token by token.

A guide is behind its sequence until it is asked: it takes the tokens that it has not seen from the sequence itself, so
preemption, moves between nodes and several tokens per step are one and the same to it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from afserve.errors import RequestError
from afserve.grammars.grammar import Compiler, Matcher

KEPT = 64  # compiled grammars, of which a request copies one: 6 us where compiling takes milliseconds


class Guide:
    """One sequence's place in its grammar. Every method but `ready` is for the engine's thread, once it is ready."""

    def __init__(self, compiled: "Future[Matcher]") -> None:
        self._compiled = compiled
        self._matcher: Matcher | None = None
        self._seen = 0

    @property
    def ready(self) -> bool:
        """Whether it is compiled, or cannot be."""
        return self._compiled.done()

    def allows(self, tokens: Sequence[int], start: int, token: int) -> bool:
        """Whether `token` may follow the answer `tokens[start:]`."""
        return self._at(tokens, start).allows(token)

    def allowed_B(self, tokens: Sequence[int], start: int) -> NDArray[np.uint8]:
        """Which tokens may follow `tokens[start:]`, in bits. Raises RequestError where it cannot be followed."""
        return self._at(tokens, start).allowed_B()

    def forced(self, tokens: Sequence[int], start: int) -> list[int]:
        """How `tokens[start:]` goes on if only one text may follow. Raises RequestError as `allowed_B`."""
        return self._at(tokens, start).forced()

    def complete(self, tokens: Sequence[int], start: int) -> bool:
        """Whether nothing can follow. A grammar in error is not complete: the next question to it tells why. Nor is one
        that has followed tokens behind these, of a draft that was confirmed."""
        if len(tokens) - start < self._seen:
            return False
        try:
            return self._at(tokens, start).is_complete
        except RequestError:
            return False

    def _at(self, tokens: Sequence[int], start: int) -> Matcher:
        if self._matcher is None:
            self._matcher = self._compiled.result().copy()
        behind = tokens[start + self._seen :]
        if behind:
            self._matcher.consume(behind)
            self._seen += len(behind)
        return self._matcher


class Guides:
    """Of one attention node. Its thread begins with the first grammar."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._kept: OrderedDict[str, Future[Matcher]] = OrderedDict()

    def open(self, grammar: str) -> Guide:
        compiled = self._kept.get(grammar)
        if compiled is None:
            compiled = self._kept[grammar] = self._thread.submit(self._compiler.compile, grammar)
        self._kept.move_to_end(grammar)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return Guide(compiled)

    def wait(self, timeout: float) -> None:
        """Until no grammar is being compiled, at most `timeout` seconds."""
        wait(self._kept.values(), timeout)
