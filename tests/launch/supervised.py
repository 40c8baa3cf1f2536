"""A supervisor whose children run the lines of a text: `python -m tests.launch.supervised LINES RECOVERS`.

The last word is empty where losses end the run.
"""

import sys

SCRIPT = """
import os, signal, sys
from afserve.errors import AfserveError, ConfigError
from afserve.launch.processes.supervisor import Supervisor, Wanted
from afserve.member import AttentionPhase, Role

def live(life):
    wanted = life.wanted.get("nano", Wanted({{}}, {{}}))
    print(life.number, dict(wanted.counts), dict(wanted.phases), dict(life.reports.learnt), flush=True)
    {body}

try:
    Supervisor(live, recovers={recovers}).run()
except AfserveError as error:
    print(type(error).__name__, error.message)
except KeyboardInterrupt:
    print("interrupted")
else:
    print("returned")
"""

if __name__ == "__main__":
    lines, recovers = sys.argv[1:]
    exec(SCRIPT.format(body=lines.replace("\n", "\n    "), recovers=bool(recovers)), {})
