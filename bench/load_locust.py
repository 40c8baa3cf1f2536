"""What locust's users do for `bench.load_clients`: streams one after the other, timed as they are read.

locust itself times until the response's head. When the wanted number of requests has ended, it stops, and the medians
lie in the file that LOAD_REPORT names.
"""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import gevent
from locust import HttpUser, constant, events, task
from locust.exception import StopUser

TOKENS, REQUESTS = int(os.environ["LOAD_TOKENS"]), int(os.environ["LOAD_REQUESTS"])
BODY = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": TOKENS,
    "stream": True,
}
first: list[float] = []
gaps: list[float] = []
whole: list[float] = []
failed: list[str] = []
begun: list[float] = []


class Reader(HttpUser):
    wait_time = constant(0)

    @task
    def ask(self) -> None:
        if len(begun) >= REQUESTS:
            raise StopUser
        began, times = time.perf_counter(), []
        begun.append(began)
        with self.client.post("/v1/chat/completions", json=BODY, stream=True, catch_response=True) as answer:
            for line in answer.iter_lines(chunk_size=None):
                if line.startswith(b"data: {") and b'"finish_reason"' in line:
                    times.append(time.perf_counter())
            if answer.status_code != 200 or len(times) != TOKENS:
                failed.append(f"{answer.status_code}, {len(times)} tokens")
                answer.failure(failed[-1])
                return
        first.append(times[0] - began)
        gaps.append((times[-1] - times[0]) / (TOKENS - 1))
        whole.append(times[-1] - began)


@events.test_start.add_listener
def begin(environment: Any, **_: object) -> None:
    """Ends the run when every request has its answer: locust itself only knows how long to run."""

    def ended() -> None:
        while len(whole) + len(failed) < REQUESTS:
            gevent.sleep(0.05)
        environment.runner.quit()

    gevent.spawn(ended)


@events.quitting.add_listener
def told(environment: object, **_: object) -> None:
    """Before locust ends."""
    medians = {
        name: statistics.median(values) * 1e3
        for name, values in (("ttft", first), ("gap", gaps), ("e2e", whole))
    }
    report = {**medians, "requests": len(whole), "errors": len(failed)}
    Path(os.environ["LOAD_REPORT"]).write_text(json.dumps(report))
