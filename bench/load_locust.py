"""What locust's users do for `bench.load_clients`: streamed chats one after the other, timed as they are read.

locust itself times until the response's head. When the wanted number of requests has ended, it stops, and the medians
lie in the file that LOAD_REPORT names. A token is read when its chunk is there, whole; how many there were is what the
server says at the end. With a LOAD_PERIOD each user begins a request every so many seconds, and users begin LOAD_STEP
seconds after one another: locust itself starts all of a second at once.
"""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import gevent
from locust import HttpUser, constant_pacing, events, task
from locust.exception import StopUser

TOKENS, REQUESTS = int(os.environ["LOAD_TOKENS"]), int(os.environ["LOAD_REQUESTS"])
PERIOD, STEP = float(os.environ["LOAD_PERIOD"]), float(os.environ["LOAD_STEP"])
MESSAGES = [
    json.loads(line)["messages"] for line in Path(os.environ["LOAD_PROMPTS"]).read_text().splitlines()
]
BODY = {
    "model": os.environ["LOAD_MODEL"],
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
first: list[float] = []
gaps: list[float] = []
whole: list[float] = []
counted: list[int] = []
failed: list[str] = []
begun: list[float] = []
users: list["Reader"] = []


class Reader(HttpUser):  # type: ignore[misc]  # locust is checked without its types
    wait_time = constant_pacing(PERIOD)

    def on_start(self) -> None:
        users.append(self)
        gevent.sleep((len(users) - 1) * STEP)

    @task  # type: ignore[untyped-decorator]  # the same
    def ask(self) -> None:
        if len(begun) >= REQUESTS:
            raise StopUser
        body = {**BODY, "messages": MESSAGES[len(begun) % len(MESSAGES)]}
        began, lines = time.perf_counter(), []
        begun.append(began)
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as answer:
            # Parsed later, so that reading is all that is timed.
            for line in answer.iter_lines(chunk_size=None):
                if line.startswith(b"data: {"):
                    lines.append((time.perf_counter(), line))
            chunks = [(at, json.loads(line[6:])) for at, line in lines]
            times = [
                at for at, chunk in chunks if any(one["delta"].get("content") for one in _choices(chunk))
            ]
            tokens = sum((chunk.get("usage") or {}).get("completion_tokens", 0) for _, chunk in chunks)
            if answer.status_code != 200 or tokens != TOKENS or len(times) < 2:
                failed.append(f"{answer.status_code}, {tokens} tokens")
                answer.failure(failed[-1])
                return
        counted.append(tokens)
        first.append(times[0] - began)
        gaps.append((times[-1] - times[0]) / (TOKENS - 1))
        whole.append(times[-1] - began)


def _choices(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    return chunk.get("choices") or []


@events.test_start.add_listener  # type: ignore[untyped-decorator]  # the same
def begin(environment: Any, **_: object) -> None:
    """Ends the run when every request has its answer: locust itself only knows how long to run."""

    def ended() -> None:
        while len(whole) + len(failed) < REQUESTS:
            gevent.sleep(0.05)
        environment.runner.quit()

    gevent.spawn(ended)


@events.quitting.add_listener  # type: ignore[untyped-decorator]  # the same
def told(environment: object, **_: object) -> None:
    """Before locust ends."""
    medians = {
        name: statistics.median(values) * 1e3 if values else 0.0
        for name, values in (("ttft", first), ("gap", gaps), ("e2e", whole))
    }
    report = {**medians, "requests": len(whole), "errors": len(failed), "tokens": sum(counted)}
    Path(os.environ["LOAD_REPORT"]).write_text(json.dumps(report))
