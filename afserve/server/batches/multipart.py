"""A multipart/form-data body (RFC 7578) as its fields. Small and strict: what it does not understand it refuses."""

import re
from dataclasses import dataclass

from afserve.errors import RequestError, shown

MAX_PARTS = 16
_BOUNDARY = re.compile(r'boundary="?([^";]{1,70})"?', re.IGNORECASE)
_NAME = re.compile(rb'[; ]name="([^"]*)"')
_FILE = re.compile(rb'filename="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Field:
    data: bytes
    filename: str | None


def fields_of(content_type: str, body: bytes) -> dict[str, Field]:
    """By name. Raises RequestError."""
    found = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or found is None:
        raise RequestError(f"Content-Type: {shown(content_type)} is not multipart/form-data with a boundary")
    boundary = b"--" + found[1].encode()
    first, *parts = (b"\r\n" + body).split(b"\r\n" + boundary, MAX_PARTS + 1)
    if first.strip() or not parts or not parts[-1].startswith(b"--") or len(parts) > MAX_PARTS:
        raise RequestError(f"the body is no form of at most {MAX_PARTS - 1} parts between its boundaries")
    return dict(_part(part) for part in parts[:-1])


def _part(part: bytes) -> tuple[str, Field]:
    head, found, data = part.partition(b"\r\n\r\n")
    name, file = _NAME.search(head), _FILE.search(head)
    if not found or name is None:
        raise RequestError("the form has a part without a name")
    filename = file[1].decode("utf-8", "replace") if file else None
    return name[1].decode("utf-8", "replace"), Field(data, filename)
