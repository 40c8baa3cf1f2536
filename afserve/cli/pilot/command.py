"""`afserve pilot`: what a pilot would have done."""

from afserve.cli.main import LazyGroup

pilot = LazyGroup(
    {
        "replay": (
            "afserve.cli.pilot.replay:replay",
            "Play a pilot over a trace, beside others that size pools.",
        )
    },
    "pilot",
    "Pools that size themselves: `afserve up --pilot advise|act` does it live.",
)
