"""The lines of a batch, as OpenAI has them: read and checked whole before anything is asked."""

import json
from dataclasses import dataclass
from pathlib import Path

from afserve.cli.options import read_given_text
from afserve.errors import ConfigError, shown

_FIRST = '{"id": "batch_req_'  # how each line of an output begins
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


@dataclass(frozen=True, slots=True)
class Line:
    """One request. `body` is JSON as it is sent."""

    custom_id: str
    url: str
    body: bytes


def read_lines(path: Path) -> list[Line]:
    """Raises ConfigError naming the line that is none, or says a custom_id again."""
    found: dict[str, Line] = {}
    for number, text in enumerate(read_given_text(path, str(path)).split("\n"), 1):
        if text.strip():
            line = _line(f"{path}: line {number}", text)
            if line.custom_id in found:
                raise ConfigError(f"{path}: line {number}: custom_id {shown(line.custom_id)} is there twice")
            found[line.custom_id] = line
    if not found:
        raise ConfigError(f"{path}: holds no request")
    return list(found.values())


def answered(path: Path) -> set[str]:
    """The custom_ids that an output has good answers to. Other lines, and a last one that was cut, are taken out."""
    *whole, cut = read_given_text(path, f"--output {path}").split("\n")
    if not whole and not (cut.startswith(_FIRST) or _FIRST.startswith(cut)):
        raise ConfigError(f"--output {path}: not the answers of a batch; give another name")
    kept: dict[str, str] = {}
    for number, line in enumerate(whole, 1):
        try:
            row = json.loads(line)
            if row["error"] is None and row["response"]["status_code"] == 200:
                kept[row["custom_id"]] = line
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ConfigError(f"--output {path}: line {number}: not an answer of a batch") from error
    new = path.with_name(path.name + ".new")
    new.write_text("".join(f"{line}\n" for line in kept.values()), encoding="utf-8")
    new.replace(path)
    return set(kept)


def _line(where: str, text: str) -> Line:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    fields = row if isinstance(row, dict) else {}
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not isinstance(body, dict):
        raise ConfigError(f"{where}: needs a custom_id, a method, a url and a body")
    if url not in URLS or fields.get("method", "POST") != "POST":
        raise ConfigError(f"{where}: {shown(url)} is not one of POST {', '.join(URLS)}")
    if body.get("stream"):
        raise ConfigError(f"{where}: stream: an answer in a batch is no stream")
    return Line(custom_id, url, json.dumps(body).encode())
