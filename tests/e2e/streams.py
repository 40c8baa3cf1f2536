"""Greedy streams beside each other, read to their ends in the background: what each client was told."""

import json
import threading
import time

import httpx

SECONDS = 150.0
PROMPTS = ("import os\n", "def main():\n", "class Stack:\n", "for i in range(3):\n", "x = [", "try:\n")
ASK = {"max_tokens": 240, "temperature": 0, "ignore_eos": True, "stream": True}
# What drafts do not guess: it takes seconds. Of greedy tokens they guess 3,000 within half a second.
ENDLESS = {**ASK, "max_tokens": 3000, "temperature": 2, "seed": 1}
AFTER = 80


class Stream(threading.Thread):
    """One request. `ends` counts how often it was told that it is over, which should be once."""

    def __init__(self, url: str, prompt: str, asked: dict = ASK) -> None:
        super().__init__(daemon=True)
        self.url, self.prompt, self.asked = url, prompt, asked
        self.text, self.pieces, self.ends, self.error = "", 0, 0, ""

    def run(self) -> None:
        body = {**self.asked, "prompt": self.prompt}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=SECONDS) as answer:
            if answer.status_code != 200:
                self.error = answer.read().decode()
                self.ends = 1
                return
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.ends += 1
                elif line.startswith("data: {"):
                    self._add(json.loads(line[6:]))

    def _add(self, body: dict) -> None:
        self.error = self.error or str(body.get("error", ""))
        for choice in body.get("choices", ()):
            self.text += choice["text"]
        self.pieces += 1


def wait(condition, what: str = "it"):
    """The first value that counts as true."""
    until = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < until, f"{what} has not come"
        time.sleep(0.01)
    return found


def begun(url: str, tokens: int = ASK["max_tokens"]) -> list[Stream]:
    """One stream of each prompt; all have tokens."""
    streams = [Stream(url, prompt, {**ASK, "max_tokens": tokens}) for prompt in PROMPTS]
    for stream in streams:
        stream.start()
    wait(lambda: all(stream.pieces > 2 or not stream.is_alive() for stream in streams), "a first token")
    return streams


def ended(streams: list[Stream]) -> list[Stream]:
    """All of them, each answered exactly once."""
    for stream in streams:
        stream.join(SECONDS)
        assert not stream.is_alive() and stream.ends == 1, (stream.prompt, stream.pieces, stream.error)
    return streams


def few(url: str) -> dict[str, str]:
    """The first AFTER tokens that each prompt is answered."""
    return texts(begun(url, AFTER))


def texts(streams: list[Stream]) -> dict[str, str]:
    """What was answered. No request may have failed."""
    assert [stream.error for stream in ended(streams)] == [""] * len(streams)
    return {stream.prompt: stream.text for stream in streams}


def same_after(url: str, expected: dict[str, str]) -> bool:
    """Whether what is asked after a fault is answered as without one: the first AFTER tokens of each prompt."""
    return begins(expected, few(url))


def begins(expected: dict[str, str], shorter: dict[str, str]) -> bool:
    """An answer that ends within a character has its replacement there."""
    found = {prompt: text.rstrip("\ufffd") for prompt, text in shorter.items()}
    return found.keys() == expected.keys() and all(t and expected[p].startswith(t) for p, t in found.items())
