"""HTTP/1.1 answers and event streams from bytes as they arrive, with as little work as possible. No sockets.

The work that the client does for each token is the client's own cost, and a library's parser would be most of it.
"""

from afserve.errors import ProtocolError

_MOST_HEAD = 64 << 10
_MOST_EVENT = 8 << 20


class HttpAnswer:
    """One answer. `feed` gives the new bytes of its body; `done` once it is whole. Raises ProtocolError."""

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self.keeps_open = True
        self._buffer = bytearray()
        self._left: int | None = None  # bytes of the body or the chunk; None: until the connection ends
        self._chunked = False
        self._trailer = False

    def feed(self, data: bytes) -> bytes:
        self._buffer += data
        if not self.status and not self._read_head():
            return b""
        return self._chunks() if self._chunked else self._plain()

    def closed(self) -> bool:
        """The connection has ended; whether that is the end of the answer."""
        if self.status and not self._chunked and self._left is None:
            self.done = True
        self.keeps_open = False
        return self.done

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MOST_HEAD:
                raise ProtocolError(f"the head of an answer has more than {_MOST_HEAD} bytes")
            return False
        lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        status = lines[0].split(b" ", 2)
        if len(status) < 2 or not status[0].startswith(b"HTTP/1.") or not status[1].isdigit():
            raise ProtocolError(f"not an HTTP/1 answer: {lines[0][:60]!r}")
        if status[1].startswith(b"1"):
            return self._read_head()  # an interim answer, such as 103
        self.status = int(status[1])
        fields = {}
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            fields[name.strip().lower()] = value.strip()
        self._chunked = b"chunked" in fields.get(b"transfer-encoding", b"").lower()
        length = fields.get(b"content-length")
        if length is not None and not length.isdigit():
            raise ProtocolError(f"content-length: {length[:20]!r} is no number")
        self._left = 0 if self._chunked else None if length is None else int(length)
        self.keeps_open = b"close" not in fields.get(b"connection", b"").lower() and status[0] == b"HTTP/1.1"
        return True

    def _plain(self) -> bytes:
        taken = bytes(self._buffer if self._left is None else self._buffer[: self._left])
        del self._buffer[: len(taken)]
        if self._left is not None:
            self._left -= len(taken)
            self.done = not self._left
        return taken

    def _chunks(self) -> bytes:
        out, at, buffer = bytearray(), 0, self._buffer
        while not self.done:
            if self._left:
                part = buffer[at : at + self._left]
                if not part:
                    break
                out += part
                at, self._left = at + len(part), self._left - len(part)
                continue
            end = buffer.find(b"\r\n", at)
            if end < 0:
                break
            line, at = bytes(buffer[at:end]), end + 2
            if self._trailer:
                self.done = not line
            elif line:  # an empty line ends the chunk before
                self._left = _chunk_length(line)
                self._trailer = not self._left
        del buffer[:at]
        return bytes(out)


def _chunk_length(line: bytes) -> int:
    try:
        length = int(line.partition(b";")[0], 16)
    except ValueError as error:
        raise ProtocolError(f"not the length of a chunk: {line[:20]!r}") from error
    if length < 0:
        raise ProtocolError(f"not the length of a chunk: {line[:20]!r}")
    return length


class Events:
    """The data of server-sent events, one line each, as OpenAI-compatible servers send them."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MOST_EVENT:
            raise ProtocolError(f"an event has more than {_MOST_EVENT} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
