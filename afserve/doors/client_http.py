"""What both clients share of HTTP: paths, defaults, and how an answer or a lost connection becomes a value or an error.

Knows httpx; what bodies and events mean is in `client_wire`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx

from afserve.doors.client_wire import error_of, unreachable

DEFAULT_URL = "http://127.0.0.1:8000"
RESUME_SECONDS = 30.0
RETRIES = 2
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
Prompt = str | Sequence[int]
Input = Prompt | Sequence[str] | Sequence[Sequence[int]]
Messages = Sequence[Mapping[str, object]]
Extra = Mapping[str, object] | None
Nodes = int | str | None  # 3: so many; "+1" or "-1": more or fewer; None: as many as there are


class ErrorReply(Exception):
    """The server answered with an error."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(response.status_code)
        self.response = response


def headers_of(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def verify(url: str) -> bool:
    """Certificates are checked, and the 50 to 100 ms of loading them paid, wherever there are any."""
    return not url.lower().startswith("http://")


def timeout_of(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=min(seconds, 5.0))


def checked(response: httpx.Response) -> httpx.Response:
    if response.is_error:
        raise error_of(response.status_code, response.text, response.headers.get("retry-after"))
    return response


def object_of(response: httpx.Response) -> Mapping[str, object]:
    body = response.json()
    assert isinstance(body, dict)
    return body


@contextmanager
def clear_errors(url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.TransportError, httpx.InvalidURL, ValueError) as error:
        raise unreachable(url, error) from error
