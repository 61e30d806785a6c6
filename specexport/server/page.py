"""The page at ``/``: a streamed conversation or text, with the origin of each token."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Response

_ASSETS = Path(__file__).parent / "assets"
_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in ("markdown", "tree", "pane", "page")},
}
PATHS = tuple(_FILES)
"""Paths that need no API key: the page asks its user for one."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Adds the page's routes, which the API's document leaves out."""
    for path, (name, kind) in _FILES.items():
        answer = Response((_ASSETS / name).read_bytes(), headers=_HEADERS, media_type=kind)
        app.add_api_route(path, lambda answer=answer: answer, include_in_schema=False)
