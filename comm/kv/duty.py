"""Who looks after the connections: the node's thread while it has nothing else to do, else the thread of the wires.

To wake one thread by another takes as long as a copy, so an idle node sleeps in the connections themselves. One that
computes has the others' bytes read beside it. What is near, inside a host, is read by the node alone, also between two
steps, since only heads come: the wires' thread says once that something is there. Each set of connections is one of
the kernel's, so to take it over is one call, however many there are. It knows no messages.
"""

import contextlib
import select
import socket
from collections.abc import Callable

from afserve.comm.kv.stream import PeerStream

COMES, ROOM = select.EPOLLIN, select.EPOLLOUT  # bytes of the other end, and the kernel's for more of this one
Ready = list[tuple[PeerStream, int]]


class ConnectionWatch:
    """Connections that one thread looks after at a time. Any thread adds them, and takes them out."""

    def __init__(self) -> None:
        self.poll = select.epoll()
        self._by_file: dict[int, PeerStream] = {}
        self._wanted: dict[PeerStream, int] = {}

    def look(self, stream: PeerStream, wanted: int) -> None:
        """For this from now on; while nobody else reads or writes there, and for nothing before it is closed."""
        known = self._wanted.get(stream, 0)
        if wanted == known:
            return
        file = stream.connection.fileno()
        if not wanted:
            self.poll.unregister(file)
            del self._by_file[file], self._wanted[stream]
            return
        self._by_file[file], self._wanted[stream] = stream, wanted
        (self.poll.modify if known else self.poll.register)(file, wanted)

    def ready(self) -> Ready:
        """Those that have something to read or may be written, and which of the two."""
        found = [(self._by_file.get(file), what) for file, what in self.poll.poll(0)]
        return [(stream, what) for stream, what in found if stream is not None]


class Duty:
    """`near` and `far` connections, and the places where the two threads sleep."""

    def __init__(self) -> None:
        self.near, self.far = ConnectionWatch(), ConnectionWatch()
        self._near_mine = self._far_mine = False  # the node's thread has them
        self._called = False  # the wires' thread has said that something is near
        self._asleep, self._beside = select.epoll(), select.epoll()  # of the node's thread, of the wires'
        self._bell, self._ringer = socket.socketpair()
        self._stop, self._stopper = socket.socketpair()
        for end in (self._bell, self._ringer):
            end.setblocking(False)
        for file in (self._bell, self.near.poll, self.far.poll):
            self._asleep.register(file, COMES)
        self._beside.register(self._stop, COMES)
        self._beside.register(self.near.poll, COMES | select.EPOLLONESHOT)
        self._beside.register(self.far.poll, COMES)

    # ---- by the node's thread

    @property
    def mine(self) -> bool:
        """Whether anything is looked after by nobody but the node."""
        return self._near_mine or self._far_mine or self._called

    @property
    def writes(self) -> bool:
        """Whether the node's thread writes what is long."""
        return self._far_mine

    def take(self, keep: bool) -> Ready:
        """What is ready of the connections that the node looks after: all, or only near ones, where it is not to
        `keep` them. The wires' thread may be about to look once more after what is taken here."""
        self._keep(keep)
        if keep or self._called:
            self.expect()
        found = self.near.ready() if self._near_mine else []
        if not (found or keep):
            self.leave()
        return found + self.far.ready() if keep else found

    def leave(self) -> None:
        """The wires' thread looks after all again."""
        self._keep(False)
        if self._near_mine:
            self._near_mine = False
            self._beside.modify(self.near.poll, COMES | select.EPOLLONESHOT)

    def expect(self) -> None:
        """Something near is looked for by the node, until nothing comes."""
        if not self._near_mine:
            self._near_mine = True
            self._beside.modify(self.near.poll, 0)
        self._called = False

    def sleep(self, seconds: float) -> None:
        """Until something is ready, somebody rings, or so much time is over."""
        self._keep(True)
        self.expect()
        for file, _ in self._asleep.poll(seconds):
            if file == self._bell.fileno():
                self._bell.recv(4096)

    def _keep(self, far: bool) -> None:
        if far is not self._far_mine:
            self._far_mine = far
            self._beside.modify(self.far.poll, 0 if far else COMES)

    # ---- by any thread

    def ring(self) -> None:
        """The node does not sleep, or wakes."""
        with contextlib.suppress(OSError):  # it was rung often and has not looked yet, or has ended
            self._ringer.send(b"!")

    def stop(self) -> None:
        self._stopper.send(b"!")

    def look(self, stream: PeerStream) -> None:
        """ConnectionWatch a connection, or once more after something was read or written there."""
        room = ROOM if stream.out else 0
        if stream.near:
            self.near.look(stream, COMES)
            self.far.look(stream, room)  # the node may compute for long
        else:
            self.far.look(stream, COMES | room)

    def forget(self, stream: PeerStream) -> None:
        """Before it is closed."""
        self.near.look(stream, 0)
        self.far.look(stream, 0)

    # ---- by the wires' thread

    def wait(self, called: Callable[[], None]) -> Ready:
        """Far connections. Where something is near, the node is `called`."""
        files = {file for file, _ in self._beside.poll()}
        if self.near.poll.fileno() in files:
            self._called = True
            called()
        return self.far.ready() if self.far.poll.fileno() in files else []

    def close(self) -> None:
        """Once neither thread looks any more."""
        for place in (self._asleep, self._beside, self.near.poll, self.far.poll):
            place.close()
        for end in (self._bell, self._ringer, self._stop, self._stopper):
            end.close()
