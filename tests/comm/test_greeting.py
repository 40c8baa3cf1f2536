"""Who has the run's token is let in and told the terms; nobody else is told anything, whatever they send or repeat."""

import contextlib
import json
import select
import socket
import threading
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.comm.transports import greeting
from afserve.errors import AfserveError, AuthError, RendezvousError

WORDS, ANSWER = {"hidden": "24", "model": "7"}, {"hidden": "25", "turn": "1"}
PATIENCE = 20.0
FAILS = (OSError, AfserveError)


@dataclass
class Tap:
    """What went each way, and what the relay makes of it: `cut` after so many bytes, one bit of byte `flip` turned."""

    cut: int = 1 << 30
    flip: int = -1
    seen: bytearray = field(default_factory=bytearray)

    def pass_on(self, data):
        start = len(self.seen)
        self.seen += data
        changed = bytearray(data)
        if start <= self.flip < start + len(data):
            changed[self.flip - start] ^= 1
        return bytes(changed[: max(0, self.cut - start)])

    @property
    def over(self):
        return len(self.seen) >= self.cut


@dataclass
class Meeting:
    """A greeting of both ends with a relay between them."""

    up: Tap = field(default_factory=Tap)
    down: Tap = field(default_factory=Tap)
    tokens: tuple[str, str] = ("secret", "secret")
    purposes: tuple[str, str] = ("rows", "rows")
    called: object = None
    heard: object = None

    def run(self):
        (caller, near), (far, listener) = socket.socketpair(), socket.socketpair()
        until = time.monotonic() + PATIENCE
        ends = [
            threading.Thread(target=self._call, args=(caller, until)),
            threading.Thread(target=self._listen, args=(listener, until)),
        ]
        for end in ends:
            end.start()
        self._relay(near, far)
        for end in ends:
            end.join()
        return self

    def _call(self, connection, until):
        with connection:
            try:
                self.called = greeting.call(
                    connection, self.tokens[0], self.purposes[0], WORDS, "expert-0", until
                )
            except FAILS as error:
                self.called = error

    def _listen(self, connection, until):
        with connection:
            try:
                caller = greeting.listen(connection, self.tokens[1], self.purposes[1], until)
                self.heard = caller.words
                caller.send_answer(ANSWER)
            except FAILS as error:
                self.heard = self.heard or error

    def _relay(self, near, far):
        ways = {near: (far, self.up), far: (near, self.down)}
        with near, far:
            while not (self.up.over or self.down.over):
                for source in select.select(list(ways), [], [])[0]:
                    target, tap = ways[source]
                    try:
                        data = source.recv(4096)
                    except ConnectionError:
                        data = b""
                    if not data:
                        return
                    with contextlib.suppress(OSError):
                        target.sendall(tap.pass_on(data))


WHOLE = Meeting().run()


def test_both_ends_hear_the_others_words():
    assert (WHOLE.called, WHOLE.heard) == (ANSWER, WORDS)


def test_the_token_and_the_terms_are_said_last():
    told = bytes(WHOLE.down.seen)
    assert b"secret" not in told + bytes(WHOLE.up.seen)
    assert b"hidden" not in told[: 16 + 16 + 32] and b"hidden" in told[16 + 16 + 32 :]
    assert b"hidden" not in WHOLE.up.seen[: 16 + 16]


@pytest.mark.parametrize("way", ["up", "down"])
def test_cut_at_every_byte_it_is_no_greeting(way):
    length = len(getattr(WHOLE, way).seen)
    for cut in range(length):
        met = Meeting(**{way: Tap(cut=cut)}).run()
        assert isinstance(met.called, FAILS), cut
        assert isinstance(met.heard, FAILS) or (way == "down" and met.heard == WORDS), cut
        assert b"hidden" not in met.down.seen or (way == "down" and cut >= 64)


@pytest.mark.parametrize("way", ["up", "down"])
def test_with_one_bit_turned_anywhere_it_is_no_greeting(way):
    """But for the length of what follows, which may say more than comes: then it is cut, at its deadline."""
    length, before = len(getattr(WHOLE, way).seen), 32 if way == "up" else 64
    for flip in set(range(length)) - set(range(before, before + 4)):
        met = Meeting(**{way: Tap(flip=flip)}).run()
        assert isinstance(met.called, FAILS), flip
        assert isinstance(met.heard, FAILS) or (way == "down" and flip >= 64), flip


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tokens": ("secret", "other")}, "expert-0: who answers there does not have this run's token"),
        ({"tokens": ("", "secret")}, "does not have this run's token"),
        ({"purposes": ("kv", "rows")}, "does not greet like a node of this version"),
    ],
)
def test_who_has_another_token_or_purpose_hears_nothing(fields, why):
    met = Meeting(**fields).run()
    assert why in met.called.message and isinstance(met.heard, FAILS)
    assert len(met.down.seen) <= 64 and b"hidden" not in met.up.seen


def answers_to(*parts, token="secret"):
    """All that a listener says to who sends these parts, one after the other, and how it ends."""
    mine, theirs = socket.socketpair()
    mine.settimeout(PATIENCE)
    ended = []

    def listen():
        with theirs:
            try:
                ended.append(greeting.listen(theirs, token, "rows", time.monotonic() + PATIENCE))
            except FAILS as error:
                ended.append(error)

    listener = threading.Thread(target=listen)
    listener.start()
    said = b""
    with mine, contextlib.suppress(OSError):
        for part in parts:
            mine.sendall(part(said) if callable(part) else part)
            if part is not parts[-1]:
                said += mine.recv(64, socket.MSG_WAITALL)
        mine.shutdown(socket.SHUT_WR)
        while more := mine.recv(4096):
            said += more
    listener.join()
    return said, ended[0]


def test_a_recorded_greeting_is_worth_nothing():
    recorded = bytes(WHOLE.up.seen)
    said, ended = answers_to(recorded[:32], recorded[32:])
    assert isinstance(ended, AuthError) and len(said) == 64
    said, ended = answers_to(recorded)
    assert isinstance(ended, AuthError) and len(said) == 64


@pytest.mark.parametrize("body", [b"", b"{}", json.dumps(WORDS).encode()])
def test_a_listeners_own_proof_proves_nothing_to_it(body):
    """Neither sent back in the same greeting nor brought from one beside it with the same random number."""

    def sent_back(said):
        return len(body).to_bytes(4, "little") + body + said[32:64]

    hello = bytes(WHOLE.up.seen[:16])
    first, _ = answers_to(hello + bytes(16))
    for proof in (sent_back, sent_back(first)):
        said, ended = answers_to(hello + bytes(16), proof)
        assert isinstance(ended, AuthError) and len(said) == 64


def test_who_only_sends_back_what_it_is_sent_is_named():
    mine, theirs = socket.socketpair()

    def echo():
        with theirs:
            while data := theirs.recv(4096):
                theirs.sendall(data)

    other = threading.Thread(target=echo)
    other.start()
    with mine, pytest.raises(AuthError, match="only sends back what it is sent"):
        greeting.call(mine, "secret", "rows", WORDS, "expert-0", time.monotonic() + PATIENCE)
    other.join()


@given(raw=st.binary(max_size=400), hello=st.sampled_from([b"", b"afserve ", bytes(WHOLE.up.seen[:16])]))
@settings(max_examples=200, deadline=None)
def test_any_bytes_of_a_stranger(raw, hello):
    said, ended = answers_to(hello + raw)
    assert isinstance(ended, FAILS) and len(said) in (0, 16, 64) and b"hidden" not in said


@pytest.mark.parametrize("body", ["[" * 5000, "\xff", "[]", '{"a": 1}', "", "NaN"])
def test_words_that_are_no_table_of_texts_are_refused(body, monkeypatch):
    """Of who has the token: nobody else comes so far."""
    monkeypatch.setattr(greeting.json, "dumps", lambda words: body)
    met = Meeting().run()
    assert isinstance(met.heard, RendezvousError) and "not a table of texts" in met.heard.message


def test_a_greeting_has_one_deadline_however_slowly_it_comes():
    mine, theirs = socket.socketpair()
    over = threading.Event()

    def drip():
        with mine, contextlib.suppress(OSError):
            while not over.wait(0.01):
                mine.sendall(b"a")

    dripping = threading.Thread(target=drip)
    dripping.start()
    with theirs, pytest.raises(FAILS):
        greeting.listen(theirs, "secret", "rows", time.monotonic() + 0.05)
    over.set()
    dripping.join()


def test_who_is_turned_away_comes_again():
    ends, tries = [], []

    def dial(seconds):
        mine, theirs = socket.socketpair()
        tries.append(seconds)
        if len(tries) < 4:
            theirs.close()
        else:
            ends.append(threading.Thread(target=listen, args=(theirs,)))
            ends[0].start()
        return mine

    def listen(connection):
        with connection:
            greeting.listen(connection, "secret", "rows", time.monotonic() + PATIENCE).send_answer(ANSWER)

    connection, words = greeting.greet(dial, "secret", "rows", WORDS, "expert-0", PATIENCE)
    assert words == ANSWER and len(tries) == 4 and tries == sorted(tries, reverse=True)
    ends[0].join()
    connection.close()


def test_who_is_always_turned_away_gives_up_in_time():
    def dial(seconds):
        mine, theirs = socket.socketpair()
        theirs.close()
        return mine

    with pytest.raises(greeting.TurnedAway, match="expert-0 hung up before it had answered"):
        greeting.greet(dial, "secret", "rows", WORDS, "expert-0", 0.05)
