"""A store that is written to without a pause: `python -m tests.comm.endless FOLDER`, which says when it begins."""

import sys
from pathlib import Path

from tests.comm.test_disk import keep, names, opened

if __name__ == "__main__":
    store, number = opened(Path(sys.argv[1])), 0
    print("writes", flush=True)
    while True:
        keep(store, names(*range(number, number + 5)))
        number = (number + 5) % 40
