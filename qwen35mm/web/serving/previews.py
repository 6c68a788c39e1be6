"""Previews of code in an answer: their frame, and Mermaid, which draws diagrams.

The content is untrusted: a model wrote it, and a picture or a PDF may have told the model what to write. So the frame
has no origin (`sandbox`, even if its address is opened directly), and its policy forbids loading anything. It may draw
what the page sends, and report its height to the page. The page's own policy forbids it to navigate away.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from qwen35mm.assets import asset_path
from qwen35mm.chat.replies.turns import Person
from qwen35mm.errors import NotFoundError
from qwen35mm.http.requests import request
from qwen35mm_preprocess.say import say

# Allows the frame's own blobs, from which a page in an answer may make a worker. Allows no address.
PREVIEW_POLICY = "; ".join(
    (
        "sandbox allow-scripts",
        "default-src 'none'",
        "script-src 'unsafe-inline' blob:",
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        "media-src data: blob:",
        "font-src data:",
    )
)


async def show_preview(_request: Request) -> Response:
    """The empty frame."""
    headers = {"content-security-policy": PREVIEW_POLICY, "cache-control": "no-cache"}
    return FileResponse(asset_path("web") / "preview.html", headers=headers)


class Previews:
    """The page's requests about previews."""

    @request
    def mermaid(self, person: Person) -> Any:
        """Mermaid as one script, which defines the global `mermaid`."""
        return {"script": mermaid_path().read_text("utf-8")}


def mermaid_path(package: str = "mermaidx") -> Path:
    """Mermaid's script among the files of `package`, which is never imported.

    Raises:
        NotFoundError: the extra `diagrams` isn't installed, or its package has no such file any more.
    """
    try:
        files = distribution(package).files or ()
    except PackageNotFoundError:
        files = ()
    for file in files:
        if file.name in ("mermaid.js", "mermaid.min.js"):
            return Path(str(file.locate()))
    raise NotFoundError(say("Mermaid isn't installed where this page runs: install qwen35mm[diagrams]"))
