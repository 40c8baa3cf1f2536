"""A server that speaks the Hugging Face hub's protocol for one model: listing, files with ranges, redirects, faults."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40
LARGE = 1000  # bytes from which a file is told by its sha256


@dataclass
class Repository:
    """`breaks` says after how many bytes the next answers for a file break off; `busy` how many are 503 first."""

    files: dict[str, bytes]
    name: str = "owner/tiny"
    token: str = ""
    breaks: dict[str, list[int]] = field(default_factory=dict)
    busy: int = 0
    ranges: bool = True
    served: list[tuple[str, str]] = field(default_factory=list)  # file and its range
    lies: dict[str, bytes] = field(default_factory=dict)  # other bytes than are listed
    cdn: str = ""  # another host for the files
    told: dict[str, str | None] = field(default_factory=dict)  # host and the key that it was sent

    def listing(self) -> dict:
        return {
            "id": self.name,
            "sha": COMMIT,
            "siblings": [_entry(n, data) for n, data in self.files.items()],
        }


def _entry(name: str, data: bytes) -> dict:
    entry = {
        "rfilename": name,
        "size": len(data),
        "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
    }
    if len(data) >= LARGE:
        entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


@contextlib.contextmanager
def serving(repository: Repository) -> Iterator[str]:
    """Its endpoint."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            repository.told[self.headers["host"].partition(":")[0]] = self.headers["authorization"]
            if repository.busy:
                repository.busy -= 1
                self.answer(503, b"")
            elif (
                repository.token
                and not path.startswith("/cdn/")
                and self.headers["authorization"] != f"Bearer {repository.token}"
            ):
                self.answer(401, b"")
            elif path.startswith(f"/api/models/{repository.name}/revision/"):
                known = path.rpartition("/")[2] in ("main", "v1", COMMIT)
                self.answer(200 if known else 404, json.dumps(repository.listing()).encode())
            elif path.startswith(f"/{repository.name}/resolve/{COMMIT}/"):
                self.send_response(302)
                self.send_header("location", repository.cdn + "/cdn/" + path.rpartition("/")[2])
                self.send_header("content-length", "0")
                self.end_headers()
            elif path.startswith("/cdn/"):
                self.file(path[5:])
            else:
                self.answer(404, b"")

        def file(self, name: str) -> None:
            data, asked = repository.lies.get(name, repository.files[name]), self.headers["range"] or ""
            repository.served.append((name, asked))
            at = int(asked[6:-1]) if asked and repository.ranges else 0
            extra = {"content-range": f"bytes {at}-{len(data) - 1}/{len(data)}"} if at else {}
            breaks = repository.breaks.get(name)
            self.answer(206 if at else 200, data[at:], breaks.pop(0) if breaks else None, extra)

        def answer(
            self, status: int, data: bytes, most: int | None = None, extra: dict | None = None
        ) -> None:
            self.send_response(status)
            for key, value in (extra or {}).items():
                self.send_header(key, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[:most])
            self.close_connection = most is not None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
