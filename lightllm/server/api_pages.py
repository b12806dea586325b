"""Pages for people: /chat talks to the model, /dashboard shows what the server does. One static file each."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

PAGES = Path(__file__).parent / "pages"
# Nothing is loaded from anywhere, and nothing may be asked but this server.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'"


async def chat(request: Request) -> Response:
    return _page("chat.html")


async def dashboard(request: Request) -> Response:
    return _page("dashboard.html")


def _page(name: str) -> Response:
    headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff"}
    return HTMLResponse((PAGES / name).read_bytes(), headers=headers)
