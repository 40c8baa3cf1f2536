"""A port for a server that is told its port, where other tests run beside this one."""

import os
import random
import socket

# Below those that Linux gives to whoever asks for any port, so that nobody is given one before its server has it.
_PORTS = range(16_000, 32_000)
_dice = random.Random(os.getpid())
os.register_at_fork(after_in_child=lambda: _dice.seed(os.getpid()))


def free_port() -> int:
    """One of this machine that nobody listens on; other test processes draw in another order."""
    while True:
        port = _dice.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
