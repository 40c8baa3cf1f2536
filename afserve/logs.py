"""How log lines look, as text or as JSON, and where they go. Knows nobody who writes them.

A record may carry `extra={"request_id": ..., "fields": {...}}`: JSON has both, text shows the id behind the message.
"""

import json
import logging
import sys
import time
from logging.handlers import WatchedFileHandler

from afserve.errors import ConfigError

FORMATS = ("text", "json")
STDERR = "-"
ACCESS = "afserve.access"
_TEXT = "%(asctime)s %(levelname)-7s %(message)s"


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(_TEXT)

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        request_id = getattr(record, "request_id", "")
        return f"{line} [{request_id}]" if request_id else line


class JsonLines(logging.Formatter):
    """One object per line; times in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        seconds, part = divmod(record.created, 1)
        line: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(part * 1e3):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", ""):
            line["request_id"] = request_id
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _FollowedFile(WatchedFileHandler):
    """Opens its file again once another has its name, as after logrotate. What cannot be written ends no request."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)


def configure(level: str, form: str) -> None:
    """What this process logs goes to stderr; once, where nobody has said otherwise before."""
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(_handler(logging.StreamHandler(sys.stderr), form))
    root.setLevel(level.upper())
    logging.getLogger("python_multipart").setLevel(
        logging.CRITICAL
    )  # a client's bad form is that client's to know


def open_access_log(where: str, form: str) -> None:
    """Lines of requests go to a file, which several gateways may append to, or with "-" to stderr.

    Raises ConfigError where it cannot be written.
    """
    log = logging.getLogger(ACCESS)
    try:
        handler = (
            logging.StreamHandler(sys.stderr) if where == STDERR else _FollowedFile(where, encoding="utf-8")
        )
    except OSError as error:
        raise ConfigError(f"access-log: {where}: {error.strerror}", param="access-log") from error
    for old in list(log.handlers):
        log.removeHandler(old)
        old.close()
    log.addHandler(_handler(handler, form))
    log.setLevel(logging.INFO)
    log.propagate = False


def _handler(handler: logging.Handler, form: str) -> logging.Handler:
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    return handler
