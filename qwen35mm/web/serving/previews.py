"""Previews of what an answer holds: the frame they are drawn in, and Mermaid, which draws some of them.

What is drawn was written by a model, which a picture or a PDF may have told what to write. So the frame has no origin
(`sandbox`, also where its address is opened by itself), and its policy lets it load nothing from anywhere. It may draw
what the page sends it, and tell the page how high that is. Where it would go itself, the page's own policy refuses.
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

# The frame's own blobs: a page of an answer may make its worker of one. None has an address in it.
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
    """The frame, empty."""
    headers = {"content-security-policy": PREVIEW_POLICY, "cache-control": "no-cache"}
    return FileResponse(asset_path("web") / "preview.html", headers=headers)


class Previews:
    """What the page can ask for of previews."""

    @request
    def mermaid(self, person: Person) -> Any:
        """Mermaid as one script; it makes `mermaid` a global name."""
        return {"script": mermaid_path().read_text("utf-8")}


def mermaid_path(package: str = "mermaidx") -> Path:
    """Mermaid's own distribution, as `package` has it among its files. The package itself is never imported.

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
