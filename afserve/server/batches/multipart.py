"""A multipart/form-data body (RFC 7578) as its fields, read by python-multipart. All of it stays in memory."""

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from afserve.errors import RequestError, shown

MAX_PARTS = 15
_AS_IT_IS = (b"", b"7bit", b"8bit", b"binary")


def fields_of(content_type: str, body: bytes) -> dict[str, tuple[bytes, str]]:
    """By name, each with the name of its file or "". Raises RequestError that says what is wrong with the form."""
    kind, options = parse_options_header(content_type.encode("latin-1", "replace"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise RequestError(
            f"Content-Type: {shown(content_type)} is not multipart/form-data with a boundary; a file is sent as a form"
        )
    if not body:
        raise RequestError("the form is empty: it needs a file and a purpose", param="file")
    if not body.lstrip(b"\r\n").startswith(b"--" + boundary):
        first = shown("--" + boundary.decode("utf-8", "replace"))
        raise RequestError(f"the form does not begin with the boundary of its Content-Type, {first}")
    form = _Form()
    try:
        MultipartParser(
            boundary,
            {
                "on_part_begin": form.part_begin,
                "on_header_field": form.header_field,
                "on_header_value": form.header_value,
                "on_headers_finished": form.headers_finished,
                "on_part_data": form.part_data,
                "on_part_end": form.part_end,
                "on_end": form.end,
            },
        ).write(body)
    except FormParserError as error:
        raise RequestError(f"the form cannot be read: {error}") from error
    if not form.whole:
        raise RequestError("the form was cut: it ends before its last boundary")
    return form.fields


class _Form:
    def __init__(self) -> None:
        self.fields: dict[str, tuple[bytes, str]] = {}
        self.whole = False
        self._parts = 0

    def part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise RequestError(f"the form has too many parts: at most {MAX_PARTS} parts are read")
        self._headers: dict[bytes, bytes] = {}
        self._data: list[bytes] = []

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._header = data[start:end].lower()

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._headers[self._header] = data[start:end].strip(b" \t")

    def headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        if b"name" not in options:
            raise RequestError(f"part {self._parts} of the form has no Content-Disposition with a name")
        self._name = options[b"name"].decode("utf-8", "replace")
        self._file = self._file_name(options.get(b"filename", b""))
        coded = self._headers.get(b"content-transfer-encoding", b"").lower()
        if coded not in _AS_IT_IS:
            raise self._wrong(
                f"Content-Transfer-Encoding: {shown(coded.decode('utf-8', 'replace'))}: parts are sent as they are; "
                "leave it out"
            )
        if self._name in self.fields:
            raise self._wrong("is twice in the form; send it once")

    def part_data(self, data: bytes, start: int, end: int) -> None:
        self._data.append(data[start:end])

    def part_end(self) -> None:
        self.fields[self._name] = (b"".join(self._data), self._file)

    def end(self) -> None:
        self.whole = True

    def _file_name(self, given: bytes) -> str:
        try:
            name = given.decode()
        except UnicodeDecodeError as error:
            raise self._wrong("its filename is not UTF-8") from error
        if any(ord(letter) < 0x20 or letter == "\x7f" for letter in name):
            raise self._wrong(f"its filename {shown(name)} has a control character")
        return name

    def _wrong(self, why: str) -> RequestError:
        return RequestError.about(self._name[:64], why)
