"""A program in a shell or under a parent of its own, as a process that a warm interpreter (`process.py`) forks.

`python -S -E client.py ADDRESS WORDS`. It passes its own input, output, folder and environment, and the signals that
would end it; it ends as that process does.
"""

import json
import os
import signal
import socket
import sys

if __name__ == "__main__":
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(sys.argv[1])
    order = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd(), f"/proc/{os.getpid()}/ns/net"]).encode()
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)
    socket.send_fds(connection, [order], [0, 1, 2])
    pid = json.loads(connection.recv(1024))
    for number in asked:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, asked)
    said = connection.recv(1024)
    code = json.loads(said) if said else 1
    if code < 0:
        if -code in asked:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
