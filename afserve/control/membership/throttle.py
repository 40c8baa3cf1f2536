"""How a background thread shares its processor with serving: a little work, then a pause, whatever it works on."""

import time

_WORK_S = 0.001
_PAUSE_S = 0.004


class Throttle:
    """Called between steps of one thread's work: pauses once the thread has used a millisecond of processor time.

    So a long thought takes a fifth of one core, and no token waits for more than a step of it. Without pauses a
    thought of 20 ms slowed every token of 100 ms (bench/LOG.md).
    """

    def __init__(self) -> None:
        self._since = 0.0

    def __call__(self) -> None:
        used = time.thread_time() - self._since
        if not 0 <= used < _WORK_S:  # below 0: another thread than last time
            time.sleep(_PAUSE_S)
            self._since = time.thread_time()
