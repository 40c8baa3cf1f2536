"""/v1/files and /v1/batches: JSONL in, JSONL out. A batch's lines go through the endpoints that they name."""

from collections.abc import Mapping

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from afserve.clock import WallClock
from afserve.errors import RequestError, shown
from afserve.server.access.accounts import owner_of
from afserve.server.answers.writer import Whole
from afserve.server.batches.batch import checked
from afserve.server.batches.files import PURPOSES, FileStore
from afserve.server.batches.work import Worker
from afserve.server.bodies.fields import Fields, or_else, parse_object
from afserve.server.endpoints.service import Service
from afserve.server.replies.pages import page_of
from afserve.server.replies.refusal import json_response

WINDOW = "24h"
MAX_METADATA, MAX_METADATA_CHARACTERS = 16, 512
MAX_NAME = 255


class Files:
    def __init__(self, service: Service) -> None:
        limits = service.settings
        self.bodies, self._deadline = service.bodies, limits.write_deadline
        self.store = FileStore(
            service.database, WallClock(), limits.max_file_bytes, limits.file_seconds, fair=True
        )

    async def create(self, request: Request) -> Response:
        with await self.bodies.read_body(request) as body:
            form = fields_of(request.headers.get("content-type", ""), body.data)
        if "file" not in form:
            raise RequestError.about("file", "is missing from the form")
        data, name = form["file"]
        named = form.get("purpose", (b"", ""))[0].decode("utf-8", "replace")
        if named not in PURPOSES:
            raise RequestError.about("purpose", f"{shown(named)} is none of {', '.join(PURPOSES)}")
        name = name or "file"
        if len(name) > MAX_NAME:
            raise RequestError.about(
                "file", f"its name has {len(name)} characters, at most {MAX_NAME} are taken"
            )
        stored = await self.store.put_file(owner_of(request), name, named, data)
        return json_response(stored.as_json())

    async def list_files(self, request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        files = [file.as_json() for file in await self.store.list_files(owner_of(request))]
        return json_response(
            page_of([file for file in files if purpose in (None, file["purpose"])], request.query_params)
        )

    async def show_file(self, request: Request) -> Response:
        stored = await self.store.get_file(owner_of(request), request.path_params["file_id"])
        return json_response(stored.as_json())

    async def content(self, request: Request) -> Response:
        data = await self.store.content(owner_of(request), request.path_params["file_id"])
        return Whole([data], self._deadline, b"application/octet-stream")

    async def delete_file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await self.store.delete_file(owner_of(request), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


class Batches:
    """`endpoints` are those that a batch may name; the work is the `Worker`'s."""

    def __init__(self, service: Service, files: Files, endpoints: Mapping[str, ASGIApp]) -> None:
        self._files, self._endpoints = files, endpoints
        self._worker = Worker(service, files.store, endpoints)
        self._table = self._worker.table
        self.start_watching, self.stop_working = self._worker.start_watching, self._worker.stop_working

    async def create(self, request: Request) -> Response:
        owner = owner_of(request)
        with await self._files.bodies.read_body(request) as body:
            fields = Fields(parse_object(body.data))
        endpoint, file_id = fields.text("endpoint"), or_else(fields.text("input_file_id"), "")
        if endpoint is None or endpoint not in self._endpoints:
            raise RequestError.about("endpoint", f"{shown(endpoint)} is none of {', '.join(self._endpoints)}")
        about = {"completion_window": _window(fields), "metadata": _metadata(fields)}
        total = await checked(await self._files.store.content(owner, file_id), endpoint)
        row = await self._table.create(owner, endpoint, file_id, total, about)
        self._worker.begin_batch(row)
        return json_response(row.as_json())

    async def list_batches(self, request: Request) -> Response:
        rows = await self._table.list_batches(owner_of(request))
        return json_response(page_of([row.as_json() for row in rows], request.query_params))

    async def show_batch(self, request: Request) -> Response:
        row = await self._table.get_batch(owner_of(request), request.path_params["batch_id"])
        return json_response(row.as_json())

    async def cancel_batch(self, request: Request) -> Response:
        """What is answered by now is kept."""
        owner, batch_id = owner_of(request), request.path_params["batch_id"]
        await self._table.ask_to_cancel(owner, batch_id)
        await self._worker.cancel_batch(batch_id)
        return json_response((await self._table.get_batch(owner, batch_id)).as_json())


def _window(fields: Fields) -> str:
    """OpenAI's one value; a batch that takes longer goes on all the same."""
    window = or_else(fields.text("completion_window"), WINDOW)
    if window != WINDOW:
        raise RequestError.about("completion_window", f"{shown(window)} is not {WINDOW}")
    return window


def _metadata(fields: Fields) -> Mapping[str, object] | None:
    given = fields.section("metadata")
    if given is None:
        return None
    words = [word for pair in given.raw().items() for word in pair]
    if len(words) > 2 * MAX_METADATA or any(
        not isinstance(word, str) or len(word) > MAX_METADATA_CHARACTERS for word in words
    ):
        raise RequestError.about(
            "metadata",
            f"is not at most {MAX_METADATA} pairs of texts of at most {MAX_METADATA_CHARACTERS} characters",
        )
    return given.raw()


MAX_PARTS = 15
_AS_IT_IS = (b"", b"7bit", b"8bit", b"binary")


def fields_of(content_type: str, body: bytes) -> dict[str, tuple[bytes, str]]:
    """Those of a multipart/form-data body (RFC 7578), by name, each with the name of its file or "". Raises
    RequestError that says what is wrong with the form."""
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
