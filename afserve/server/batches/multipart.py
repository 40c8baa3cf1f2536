"""A multipart/form-data body (RFC 7578) as its fields, read by python-multipart. All of it stays in memory."""

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from afserve.errors import RequestError, shown

MAX_PARTS = 15


def fields_of(content_type: str, body: bytes) -> dict[str, tuple[bytes, str]]:
    """By name, each with the name of its file or "". Raises RequestError."""
    kind, options = parse_options_header(content_type.encode("latin-1", "replace"))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise RequestError(f"Content-Type: {shown(content_type)} is not multipart/form-data with a boundary")
    parts: list[tuple[str, tuple[bytes, str]]] = []
    ended: list[bool] = []

    def add(part: Field | File) -> None:
        if len(parts) == MAX_PARTS:
            raise FormParserError("there is another one")
        name = (part.field_name or b"").decode("utf-8", "replace")
        if isinstance(part, File):
            part.file_object.seek(0)
            parts.append(
                (name, (part.file_object.read(), (part.file_name or b"").decode("utf-8", "replace")))
            )
        else:
            parts.append((name, (part.value or b"", "")))

    memory = {"MAX_MEMORY_FILE_SIZE": len(body)}
    try:
        parser = FormParser(
            kind.decode(), add, add, lambda: ended.append(True), options[b"boundary"], None, memory
        )
        parser.write(body)
        parser.finalize()
        if not ended:
            raise FormParserError("it ends before its last boundary")
    except FormParserError as error:
        raise RequestError(f"the body is no form of at most {MAX_PARTS} parts: {error}") from error
    return dict(parts)
