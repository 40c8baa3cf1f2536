"""`afserve bench`: the project's own measurements. Every one prints rows that can be appended to a results file."""

from afserve.cli.main import LazyGroup

bench = LazyGroup(
    {
        "decode": (
            "afserve.cli.bench.decode:decode",
            "Generated tokens per second, TTFT, TPOT, start-up, memory.",
        ),
        "calibrate": (
            "afserve.cli.bench.calibrate:calibrate",
            "Stage times of this machine, for `afserve plan --curves`.",
        ),
    },
    "bench",
    "Measure this installation.",
)
