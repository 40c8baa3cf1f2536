"""`afserve bench`: the project's own measurements. Every one prints rows that can be appended to a results file."""

from afserve.cli.main import LazyGroup

bench = LazyGroup(
    {
        "decode": (
            "afserve.cli.bench.decode:decode",
            "Generated tokens per second, TTFT, TPOT, start-up, memory.",
        ),
        "serve": (
            "afserve.cli.bench.serve:serve",
            "Load on a running server, and what its clients see: TTFT, gaps, goodput.",
        ),
        "agent": (
            "afserve.cli.bench.agent:agent",
            "Sessions of agents on a running server: speed, prompts found, first tokens by turn.",
        ),
        "pipeline": (
            "afserve.cli.bench.pipeline:pipeline",
            "Stage times, bubbles, hidden transfers and hold times of the ping-pong.",
        ),
        "calibrate": (
            "afserve.cli.bench.calibrate:calibrate",
            "Stage times of this machine, for `afserve plan --engine`.",
        ),
    },
    "bench",
    "Measure this installation.",
)
