"""Files and batches through the official client."""

import asyncio
import io
import json
import time

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.clock import FakeClock
from afserve.errors import CapacityError, NotFoundError, RequestError
from afserve.server.batches.batch import MAX_ENDS, TRIES, BatchEnded, checked, patiently_told
from afserve.server.batches.endpoints import fields_of
from afserve.server.batches.files import FILE_BYTES, FileStore
from afserve.server.bodies.declared import BATCH_PRIORITY
from afserve.server.state.database import Database

LINE = b'{"custom_id":"a","url":"/v1/completions","body":{}}\n'


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def lines(*bodies, url="/v1/completions"):
    asked = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": b} for i, b in enumerate(bodies)]
    return io.BytesIO("\n".join(map(json.dumps, asked)).encode())


def upload(client, data):
    return client.files.create(file=("asked.jsonl", data), purpose="batch").id


def start(client, file_id, endpoint="/v1/completions"):
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h")


def finished(client, batch):
    deadline = time.monotonic() + 60
    while batch.status == "in_progress" and time.monotonic() < deadline:
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def answers(client, file_id):
    return {a["custom_id"]: a for a in map(json.loads, client.files.content(file_id).text.splitlines())}


def test_a_batch(client, server):
    bodies = [{"model": "tiny", "prompt": "x", "max_tokens": 2 + i} for i in range(20)]
    bodies.append({"model": "tiny", "prompt": "x", "max_tokens": 0})
    file_id = upload(client, lines(*bodies))
    batch = finished(client, start(client, file_id))
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (20, 1)
    said = answers(client, batch.output_file_id)
    assert len(said) == 20 and said["r1"]["response"]["body"]["usage"]["completion_tokens"] == 3
    refused = answers(client, batch.error_file_id)["r20"]["response"]
    assert refused["status_code"] == 400 and refused["body"]["error"]["param"] == "max_tokens"
    assert {request.priority for request in server.backend.requests} == {BATCH_PRIORITY}
    assert batch.id in [each.id for each in client.batches.list()]


def test_lists_come_in_pages(client):
    """Other tests have left files here."""
    made = [client.files.create(file=(f"{i}.jsonl", b"{}"), purpose="batch").id for i in range(5)]
    whole = [file.id for file in client.files.list()]
    assert whole[:5] == made[::-1]
    assert [file.id for file in client.files.list(limit=2)] == whole  # the client asks for page after page
    page = client.files.list(limit=2, after=whole[1])
    assert [file.id for file in page.data] == whole[2:4] and page.has_more
    assert [file.id for file in client.files.list(order="asc", after=made[2]).data] == made[3:]
    assert client.files.list(purpose="user_data").data == []
    with httpx.Client(base_url=str(client.base_url)) as http:
        for query in ("limit=0", "limit=x", "limit=99999999999", "limit=-1", "after=nobody", "order=up"):
            said = http.get(f"files?{query}")
            assert said.status_code == 400 and said.json()["error"]["param"] == query.partition("=")[0]
        assert http.get("batches?limit=x").status_code == 400


@pytest.mark.slow
def test_a_batch_of_chats(client, server):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    file_id = upload(client, lines(chat, chat, url="/v1/chat/completions"))
    batch = finished(client, start(client, file_id, "/v1/chat/completions"))
    said = answers(client, batch.output_file_id)
    assert said["r0"]["response"]["body"]["choices"][0]["message"]["content"] == server.backend.reply


def test_a_batch_that_is_cancelled(client, server):
    server.backend.hold_at = 2
    try:
        batch = start(client, upload(client, lines(*[{"model": "tiny", "prompt": "x"}] * 40)))
        assert server.backend.holding.wait(20)
        assert client.batches.cancel(batch.id).status == "cancelled"
        assert len(server.backend.requests) < 40
        assert len(server.backend.closed) == len(server.backend.requests)
    finally:
        server.backend.release.set()


def test_files(client):
    file_id = upload(client, io.BytesIO(b"\r\n--x\r\n{}"))
    assert client.files.retrieve(file_id).filename == "asked.jsonl"
    assert client.files.content(file_id).content == b"\r\n--x\r\n{}"
    assert file_id in [file.id for file in client.files.list()]
    assert client.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file_id)


@pytest.mark.parametrize(
    "words, data, endpoint",
    [
        ("0 requests", b"\n", "/v1/completions"),
        ("line 1: the body is not valid JSON", b"{", "/v1/completions"),
        ("line 1: a line needs", b"{}", "/v1/completions"),
        ("line 2: custom_id 'a' is there twice", LINE * 2, "/v1/completions"),
        ("line 1: url", b'{"custom_id":"a","url":"/v1/completions","body":{}}', "/v1/chat/completions"),
        ("line 2: method: 'GET'", LINE + LINE.replace(b'"url"', b'"method":"GET","url"'), "/v1/completions"),
        ("line 2: custom_id: '' is no id", LINE + LINE.replace(b'"a"', b'""'), "/v1/completions"),
        ("line 2: custom_id: .*surrogate", LINE + LINE.replace(b'"a"', b'"x\\ud800"'), "/v1/completions"),
        ("line 1: stream", b'{"custom_id":"a","url":"/v1/completions","body":{"stream":true}}', "/v1/completions"),
        ("endpoint", b"{}", "/v1/images"),
    ],
)  # fmt: skip
def test_a_batch_that_is_refused(client, words, data, endpoint):
    file_id = upload(client, io.BytesIO(data))
    with pytest.raises(openai.BadRequestError, match=words):
        start(client, file_id, endpoint)


def test_unknown_ones(client):
    for ask in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            ask("batch_none")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("x", b"x"), purpose="vision")


@pytest.mark.parametrize("shared", [False, True])
def test_files_are_bounded_and_their_owners(tmp_path, shared):
    async def check():
        clock, database = FakeClock(), Database(str(tmp_path) if shared else "")
        store = FileStore(database, clock, most_bytes=10 + FILE_BYTES, seconds=5)
        kept = await store.put_file("me", "a\ud800", "batch", b"x" * 8)
        assert await store.content("me", kept.id) == b"x" * 8
        assert await store.list_files("you") == []
        for owner, file_id in (("you", kept.id), ("me", "\ud800")):
            with pytest.raises(NotFoundError):
                await store.get_file(owner, file_id)
            with pytest.raises(NotFoundError):
                await store.delete_file(owner, file_id)
        with pytest.raises(CapacityError):
            await store.put_file("me", "b", "batch", b"")
        clock.advance(6)
        assert await store.put_file("me", "b", "batch", b"x" * 3)
        with pytest.raises(NotFoundError):
            await store.get_file("me", kept.id)
        await database.close_file()

    asyncio.run(check())


def test_a_bug_in_a_line_is_that_lines(client, server):
    server.backend.error = ZeroDivisionError("a bug")
    server.backend.fail_at = 0
    batch = finished(client, start(client, upload(client, lines({"model": "tiny", "prompt": "x"}))))
    assert (batch.status, batch.request_counts.failed) == ("completed", 1)
    response = answers(client, batch.error_file_id)["r0"]["response"]
    assert response["status_code"] == 500 and "bug" not in json.dumps(response["body"])


def test_answers_that_no_store_would_take_end_a_batch(make_backend, run_server):
    with (
        run_server(make_backend(), max_file_bytes=4096) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        file_id = upload(client, lines(*[{"model": "tiny", "prompt": "x"}] * 20))
        batch = finished(client, start(client, file_id))
    assert batch.status == "failed" and batch.errors.data[0].code == "batch_ended"
    assert "--max-file-bytes" in batch.errors.data[0].message


def test_an_answer_is_told_again_while_the_state_is_busy(monkeypatch):
    monkeypatch.setattr("afserve.server.batches.batch.FIRST_PAUSE", 0.0)
    failures = [CapacityError("busy")] * 3

    async def tell():
        if failures:
            raise failures.pop()

    asyncio.run(patiently_told(tell, 0))
    assert not failures
    failures += [CapacityError("busy")] * TRIES
    with pytest.raises(BatchEnded, match="line 1 could not be kept: busy"):
        asyncio.run(patiently_told(tell, 0))


def test_a_file_of_empty_lines_is_not_split():
    with pytest.raises(RequestError, match="empty ones included"):
        asyncio.run(checked(b"\n" * (MAX_ENDS + 1), "/v1/completions"))
    assert asyncio.run(checked(LINE.replace(b"\n", b"\r\n") + b"\n", "/v1/completions")) == 1


def test_a_form_of_many_parts_is_refused():
    with pytest.raises(RequestError, match="cannot be read"):
        fields_of("multipart/form-data; boundary=x", b"--x\r\n" * 100_000 + b"--x--")
    part = b"".join(b'--x\r\nContent-Disposition: form-data; name="%d"\r\n\r\n\r\n' % i for i in range(16))
    with pytest.raises(RequestError, match="at most 15 parts"):
        fields_of("multipart/form-data; boundary=x", part + b"--x--\r\n")


def test_a_form_that_was_cut_is_refused():
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a b"\r\n\r\ndata\r\n--x--\r\n'
    assert fields_of('multipart/form-data; boundary="x"', form) == {"file": (b"data", "a b")}
    for end in range(len(form) - 2):
        with pytest.raises(RequestError, match="empty" if not end else "begin" if end < 3 else "was cut"):
            fields_of("multipart/form-data; boundary=x", form[:end])


PURPOSE = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n'
END = b"--x--\r\n"
CODED = FILE.replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: %s\r\n\r\n")


@pytest.mark.parametrize(
    ("form", "param", "words"),
    [
        (b"", "file", "is empty"),
        (b"hello\r\n" + FILE + END, None, "does not begin with the boundary"),
        (b"--y\r\n", None, "does not begin with the boundary of its Content-Type, '--x'"),
        (FILE + PURPOSE, None, "was cut"),
        (b"--x\r\n\r\n{}\r\n" + END, None, "part 1 of the form has no Content-Disposition with a name"),
        (b"--x\r\nno header\r\n\r\n{}\r\n" + END, None, "cannot be read"),
        (PURPOSE + FILE + FILE + END, "file", "file: is twice"),
        (PURPOSE + FILE + PURPOSE + END, "purpose", "purpose: is twice"),
        (PURPOSE + CODED % b"base64" + END, "file", "Content-Transfer-Encoding: 'base64'"),
        (PURPOSE + CODED % b"Quoted-Printable" + END, "file", "parts are sent as they are"),
        (PURPOSE + FILE.replace(b'"a"', b'"a\0b"') + END, "file", "control character"),
        (PURPOSE + FILE.replace(b'"a"', b'"\xff"') + END, "file", "filename is not UTF-8"),
    ],
)
def test_what_is_wrong_with_a_form_is_said(server, form, param, words):
    head = {"content-type": "multipart/form-data; boundary=x"}
    said = httpx.post(f"{server.url}/v1/files", content=form, headers=head)
    error = said.json()["error"]
    assert (said.status_code, error["param"]) == (400, param) and words in error["message"], error


def test_a_part_may_say_that_it_is_sent_as_it_is(server):
    head = {"content-type": "multipart/form-data; boundary=x"}
    for coding in (b"7bit", b"8BIT", b"binary"):
        form = PURPOSE + CODED % coding + END + b"what comes after is no part"
        said = httpx.post(f"{server.url}/v1/files", content=form, headers=head)
        assert (said.status_code, said.json()["bytes"]) == (200, 2), said.text


@pytest.mark.parametrize("kind", ["application/json", "multipart/mixed; boundary=x", ""])
def test_a_file_is_asked_for_as_a_form(server, kind):
    said = httpx.post(f"{server.url}/v1/files", content=b"{}", headers={"content-type": kind} if kind else {})
    assert said.status_code == 415
    assert said.json()["error"]["message"].endswith("send the header Content-Type: multipart/form-data")


@given(st.binary(max_size=200), st.text(max_size=60))
def test_no_form_breaks_the_reader(body, kind):
    for content_type in (kind, "multipart/form-data; boundary=x"):
        try:
            fields_of(content_type, body)
        except RequestError:
            continue
