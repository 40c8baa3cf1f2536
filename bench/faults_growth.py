"""What the processes of a run hold together: memory, descriptors, threads, shared memory, KV blocks, requests."""

import os
import re
from dataclasses import dataclass

import httpx
import psutil

from bench.faults_deployment import Deployment

_NAME = "afserve"


@dataclass(frozen=True, slots=True)
class Held:
    """Of all processes together. `memory` in bytes that are theirs alone, `kv_in_use` a share, summed over nodes."""

    memory: int
    descriptors: int
    threads: int
    processes: int
    segments: int
    kv_in_use: float
    requests: float
    preemptions: float
    accepted: float  # tokens of drafts


def held(here: Deployment) -> Held:
    """Raises RuntimeError where a metric is missing."""
    top = psutil.Process(here.up.process.pid)
    family = [top, *top.children(recursive=True)]
    said = httpx.get(f"{here.url}/metrics", timeout=30).text
    return Held(
        memory=sum(process.memory_full_info().uss for process in family),
        descriptors=sum(process.num_fds() for process in family),
        threads=sum(process.num_threads() for process in family),
        processes=len(family),
        segments=sum(_NAME in name for name in os.listdir("/dev/shm")),
        kv_in_use=_metric(said, "kv_cache_usage_perc"),
        requests=_metric(said, "num_requests_running") + _metric(said, "num_requests_waiting"),
        preemptions=_metric(said, "num_preemptions_total"),
        accepted=_metric(said, "spec_decode_num_accepted_tokens_total"),
    )


def _metric(said: str, name: str) -> float:
    found = re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", said, re.MULTILINE)
    if not found:
        raise RuntimeError(f"/metrics has no vllm:{name}")
    return sum(map(float, found))
