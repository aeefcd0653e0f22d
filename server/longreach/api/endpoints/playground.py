"""The playground: a page at `/` that puts questions to the served model.

Its files are read once and answered from memory. Their ETags are digests of what is in them, so that a browser asks
again after an upgrade and replicas behind one address agree; times of files, which Starlette's `StaticFiles` uses, are
the same in every wheel of a reproducible build.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).resolve().parents[2] / "playground"

# The page may load and call nothing but this server, and no other page may frame it.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"


@dataclass(frozen=True)
class PageFile:
    """A file of the page as it is sent; `etag` is quoted as in the header."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> PageFile:
        """The file at `path`, whose suffix is one that the page uses."""
        content = path.read_bytes()
        return cls(content, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def page_files(folder: Path = FOLDER) -> dict[str, PageFile]:
    """The page's files by URL path; the index is `/`, the others lie under `/playground/`."""
    files = {path.name: PageFile.read(path) for path in sorted(folder.iterdir()) if path.suffix in _MEDIA_TYPES}
    return {"/" if name == _INDEX else f"/playground/{name}": file for name, file in files.items()}


def router(files: dict[str, PageFile]) -> APIRouter:
    """Routes for the page's files."""
    routes = APIRouter()

    async def send(request: Request) -> Response:
        return _answer(request, files[request.scope["path"]])

    for path in files:
        routes.add_api_route(path, send, methods=["GET", "HEAD"], include_in_schema=False)
    return routes


def _answer(request: Request, file: PageFile) -> Response:
    headers = {
        "etag": file.etag,
        "cache-control": "no-cache",  # keep it, but ask whether it is still the same
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
