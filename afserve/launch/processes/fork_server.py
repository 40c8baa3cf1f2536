"""The fork server: one process that has imported torch and the engine, and forks each node.

The imports cost one to two seconds of CPU, here once instead of once per node. It knows no node that it has forked:
those become children of the keeper (`keeper`), which may start another fork server whenever this one is lost. It stays
single-threaded until the fork.
"""

import contextlib
import faulthandler
import gc
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from afserve.kinship import die_with_parent, name_process, wake_with_parent
from afserve.launch.processes.orders import Order, close, order_of, receive, report

if TYPE_CHECKING:
    from afserve.control.node.worker import Serve
    from afserve.member import Role

_ADOPTED_SECONDS = 0.0005  # between two looks for who the parent is


def serve(orders: socket.socket, keeper: int) -> tuple[Order, int | None] | None:
    """Forks on order. Returns the order and a listening socket in a node, None here once the keeper has gone."""
    while (received := receive(orders)) is None or received[0]:
        if received is None:
            continue
        order, listening = order_of(received[0]), received[1]
        assert isinstance(order, Order)
        if _fork(order, orders, keeper):
            return order, listening
        close(listening)
    return None


def _fork(order: Order, orders: socket.socket, keeper: int) -> bool:
    """Twice: the process between tells the node's pid and ends, so that the keeper is the node's parent."""
    try:
        between = os.fork()
    except OSError as error:
        _refuse(order, orders, error)
        return False
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        _refuse(order, orders, error)
        os._exit(0)
    if pid:
        try:
            orders.sendall(report({"started": order.name, "pid": pid}))
        finally:
            os._exit(0)
    orders.close()
    while os.getppid() == between:
        time.sleep(_ADOPTED_SECONDS)
    die_with_parent(keeper, signal.SIGKILL)
    return True


def _refuse(order: Order, orders: socket.socket, error: OSError) -> None:
    """No memory is left, or there are too many processes."""
    orders.sendall(report({"refused": order.name, "why": f"it cannot be forked: {error.strerror}"}))


def become(order: Order, listening: int | None) -> None:
    """The node's whole life."""
    from afserve.comm.binding import Binding
    from afserve.control.node.worker import NodeSettings, run_node
    from afserve.errors import AfserveError

    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _log_to(order.log)
    name_process(order.name)
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1` writes where every thread is into the log
    try:
        # Whoever gave the order has looked at what leaves this host, and said so.
        settings = NodeSettings(
            order.role,
            order.join,
            order.token,
            order.index,
            certs=order.certs,
            insecure=True,
            binding=None if order.binding is None else Binding(**order.binding),
        )
        run_node(settings, _roles(order, listening))
    except AfserveError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)


def _log_to(path: str) -> None:
    """Where its folder was removed a moment ago, or no room is left, a node without a log is better than none."""
    try:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)


def _roles(order: Order, listening: int | None) -> "Mapping[Role, Serve]":
    from afserve.control.node.worker import default_roles
    from afserve.member import Role

    if order.gateway is None or listening is None:
        return default_roles()
    from afserve.launch.processes.gateway_node import gateway_role, inherited
    from afserve.launch.processes.gateway_options import GatewayOptions
    from afserve.logs import configure

    options = GatewayOptions.from_plain(order.gateway)
    configure(options.settings.log_level, options.settings.log_format)
    return {Role.GATEWAY: gateway_role(options, inherited(listening))}


def preload() -> None:
    """Without the collector, which takes a sixth of the time; frozen, so that children share the pages."""
    gc.disable()
    import afserve.control.node.attention_process
    import afserve.control.node.expert
    import afserve.control.node.wiring  # noqa: F401

    gc.freeze()


def main(descriptor: int, keeper: int, warm: bool, folder: Path) -> None:
    """`folder` is the run's; it goes with this process if the keeper went without a word.

    Not `warm`: each child imports for itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_with_parent()
    name_process("afserve-fork")
    orders = socket.socket(fileno=descriptor)
    orders.setblocking(True)
    if warm:
        preload()
    with contextlib.suppress(OSError):  # the keeper has gone, as `serve` sees
        orders.sendall(report({"ready": os.getpid()}))
    node = serve(orders, keeper)
    if node is not None:
        become(*node)
    else:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", Path(sys.argv[4]))
