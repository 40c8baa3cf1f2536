"""The page at / and its files: who serves, how busy each side is, which experts are hot, and a place to ask something.

All of it comes from here, so that it works without a network; uPlot, which draws its charts, is in `static/vendor`.
None of it holds data: that comes by `feed`, behind the key.
"""

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FILES = Path(__file__).parents[1] / "static"
PREFIX = "/static/"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self'; connect-src 'self'; "
        "img-src data:; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Page:
    """All files are read once, at the start; a name is looked up among them and never opened."""

    def __init__(self) -> None:
        self._files = {
            path.relative_to(FILES).as_posix(): (path.read_bytes(), f"{_TYPES[path.suffix]}; charset=utf-8")
            for path in sorted(FILES.rglob("*"))
            if path.suffix in _TYPES
        }

    async def page(self, request: Request) -> Response:
        return self._answer("live.html")

    async def file(self, request: Request) -> Response:
        return self._answer(request.path_params["name"])

    def _answer(self, name: str) -> Response:
        if name not in self._files:
            raise HTTPException(404)
        body, kind = self._files[name]
        return Response(body, media_type=kind, headers=_HEADERS)
