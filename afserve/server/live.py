"""The page at /: who serves, how busy each side is, which experts are hot, and a place to ask something.

One file without anything from elsewhere; it reads /status once a second.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

PAGE = Path(__file__).parent / "static" / "live.html"
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
}


class Live:
    def __init__(self) -> None:
        self._page = PAGE.read_text(encoding="utf-8")

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=_HEADERS)
