"""kill -9 of a gateway under load, and of everything but the gateway: real processes, greedy streams compared."""

import signal
import threading
import time

import httpx
import psutil
import pytest

from afserve import Client, SamplingParams
from tests.e2e.names import named
from tests.e2e.streams import ASK, ENDLESS, PROMPTS, SECONDS, Stream, begun, ended, same_after, wait

pytestmark = pytest.mark.process
PARAMS = SamplingParams(max_tokens=ASK["max_tokens"], temperature=0, ignore_eos=True)


class Resuming(threading.Thread):
    """One stream of `Client`, which goes on by itself."""

    def __init__(self, url: str, prompt: str) -> None:
        super().__init__(daemon=True)
        self.url, self.prompt = url, prompt
        self.text, self.ends, self.error, self.pieces = "", 0, "", 0

    def run(self) -> None:
        try:
            with Client(self.url) as client:
                for delta in client.complete_stream(self.prompt, PARAMS):
                    self.text += delta.text
                    self.ends += delta.finish_reason is not None
                    self.pieces += 1
        except Exception as error:  # noqa: BLE001  whatever a client is told
            self.error = f"{type(error).__name__}: {error}"


def test_killed_gateways_lose_nothing_of_who_asked_to_resume(up, undisturbed):
    """One of two, so that the other one goes on; then that one, so that new lives do."""
    server = up("--attention", "2", "--experts", "2", "--gateways", "2")
    expected = undisturbed(server.url)
    pids = [pid for name, pid in server.status().items() if name.startswith("gateway")]
    streams = [Resuming(server.url, prompt) for prompt in PROMPTS]
    answers: dict[str, str] = {}

    def whole(prompt: str) -> None:
        with Client(server.url) as client:
            answers[prompt] = client.complete(prompt, PARAMS).text

    plain = [threading.Thread(target=whole, args=(prompt,), daemon=True) for prompt in PROMPTS[:2]]
    broken = Stream(server.url, PROMPTS[0], ENDLESS)
    broken.run = lambda: _until_it_breaks(broken)  # of one of the gateways, and both are killed
    for thread in (*streams, *plain, broken):
        thread.start()
    wait(lambda: all(stream.pieces > 2 for stream in (*streams, broken)), "a first token")
    for pid in pids:
        before = [stream.pieces for stream in streams]
        psutil.Process(pid).kill()
        wait(lambda b=before: all(s.pieces > n or not s.is_alive() for s, n in zip(streams, b, strict=True)))
    for thread in (*streams, *plain, broken):
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert [stream.error for stream in streams] == [""] * len(streams)
    assert {stream.prompt: stream.text for stream in streams} == expected
    assert [stream.ends for stream in streams] == [1] * len(streams)
    assert answers == {prompt: expected[prompt] for prompt in PROMPTS[:2]}
    assert "broke" in broken.error and not broken.ends, "without resume a client sees it"
    assert server.stop()[0] == 0


def _until_it_breaks(stream: Stream) -> None:
    try:
        Stream.run(stream)
    except httpx.TransportError as error:
        stream.error = f"broke: {error}"


def test_with_everything_but_the_gateway_killed_every_stream_ends_once(up, undisturbed):
    server = up("--attention", "2", "--experts", "2", "--gateways", "1", "--loss-deadline", "20")
    expected = undisturbed(server.url)
    streams = begun(server.url)
    family = {process.pid: process for process in server.family()}
    nodes = server.status()
    control = [p for name, p in named(family.values()) if name == "afserve-control"]
    killed = [family[pid] for name, pid in nodes.items() if not name.startswith("gateway")]
    began = time.monotonic()
    for process in (*control, *killed):
        process.send_signal(signal.SIGKILL)
    ended(streams)
    assert time.monotonic() - began < 60, "by its deadline"
    for stream in streams:
        assert stream.error or stream.text == expected[stream.prompt]
        assert expected[stream.prompt].startswith(stream.text)
    wait(lambda: is_ready(server.url), "a run that serves again")
    assert same_after(server.url, expected)
    server.stop()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False
