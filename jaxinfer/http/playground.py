"""The page at /: a chat box and the server's numbers, live. Its files are served as they are, and nothing else is.

A browser that shows it loads nothing from elsewhere and runs nothing that is not in these files: CONTENT_POLICY says so
to it. With API keys the files are open, so that a browser can ask its user for one: they hold nothing that a key
protects, and say that keys are asked for, as every refusal does. What the page shows without a key comes from /metrics
and /ready, which ask for none; the models' names and answers are asked for with it.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Mapping
from typing import NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.http.errors import HttpError

PAGE = "playground.html"
MEDIA_TYPES: Mapping[str, str] = {
    PAGE: "text/html; charset=utf-8",
    "playground.css": "text/css; charset=utf-8",
    **dict.fromkeys(
        ("playground.js", "chart.js", "chat.js", "numbers.js", "stream.js"), "text/javascript; charset=utf-8"
    ),
    "icon.svg": "image/svg+xml",
}
"""Every file, by name."""
PATHS = frozenset({"/", *(f"/static/{name}" for name in MEDIA_TYPES if name != PAGE)})
"""Where they are: the page itself at / alone."""
ASKS_FOR_KEY = b'data-asks-for-key="%s"'
"""In the page; the one place that is not as in the file."""

CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # A script that writes markup from text fails in the browser, whatever the text.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CONTENT_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Asked for again each time, and answered with 304: the files of two versions never meet.
    "Cache-Control": "no-cache",
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


def playground_routes(*, asks_for_key: bool) -> list[Route]:
    """/ and /static/...; the files are read once. asks_for_key: whether the server has API keys."""
    folder = importlib.resources.files("jaxinfer.http").joinpath("static")
    files = {}
    for name, media_type in MEDIA_TYPES.items():
        content = folder.joinpath(name).read_bytes()
        if name == PAGE and asks_for_key:
            content = content.replace(ASKS_FOR_KEY % b"no", ASKS_FOR_KEY % b"yes")
        files[name] = _File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    page = files.pop(PAGE)

    async def show_page(request: HttpRequest) -> Response:
        return _reply(request, page)

    async def show_file(request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name not in files:
            raise HttpError(404, f"there is no file {name!r} of the page", code="file_not_found")
        return _reply(request, files[name])

    return [Route("/", show_page), Route("/static/{name}", show_file)]


def _reply(request: HttpRequest, file: _File) -> Response:
    headers = {**HEADERS, "ETag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers={**headers, "Content-Type": file.media_type})
