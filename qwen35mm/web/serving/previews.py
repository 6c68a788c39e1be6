"""Previews of what an answer holds: the frame they are drawn in, and Mermaid, which draws some of them.

What is drawn was written by a model, which a picture or a PDF may have told what to write. So the frame has no origin
(`sandbox`, also where its address is opened by itself), and its policy lets it load nothing from anywhere. It may draw
what the page sends it, and tell the page how high that is. Where it would go itself, the page's own policy refuses.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import gradio
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from qwen35mm.assets import asset_path
from qwen35mm.chat.turns import Person
from qwen35mm.errors import NotFoundError
from qwen35mm.http.requests import request
from qwen35mm_preprocess.say import say

# Blobs are Mermaid's modules: the frame makes them itself, and no other has an address in it.
PREVIEW_POLICY = "; ".join(
    (
        "sandbox allow-scripts",
        "default-src 'none'",
        "script-src 'unsafe-inline' blob:",
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        "media-src data: blob:",
        "font-src data:",
        "frame-ancestors 'self'",
    )
)

_SCRIPTS = Path(gradio.__file__).parent / "templates" / "frontend" / "assets"
_IMPORTED = re.compile(r"""(["'`])\./([\w.-]+\.js)\1""")
# What else a module needs is fetched ahead by its address; here it has none.
_PRELOADED = re.compile(r"^const __vite__mapDeps=.*?;\n", re.DOTALL)


async def show_preview(_request: Request) -> Response:
    """The frame, empty."""
    headers = {"content-security-policy": PREVIEW_POLICY, "cache-control": "no-cache"}
    return FileResponse(asset_path("web") / "preview.html", headers=headers)


class Previews:
    """What the page can ask for of previews."""

    @request
    def mermaid(self, person: Person) -> Any:
        """Mermaid as modules that import each other by their names; `entry` is the one to import."""
        entry, modules = mermaid_modules()
        return {"entry": entry, "modules": modules}


@functools.lru_cache(maxsize=1)
def mermaid_modules(scripts: Path = _SCRIPTS) -> tuple[str, dict[str, str]]:
    """Mermaid out of Gradio's own page, which is installed anyway: 3.5 MB, and no copy of it to keep.

    Gradio's build has it as modules with hashed names that import each other by relative addresses. In a frame without
    an origin nothing has an address, so each name becomes one for an import map.

    Returns:
        the name of the module whose default export is Mermaid; the modules' texts by their names.

    Raises:
        NotFoundError: this Gradio has none, or not as one module.
    """
    found = [path.name for path in scripts.glob("mermaid.core-*.js")]
    if len(found) != 1:
        version = gradio.__version__
        raise NotFoundError(
            say("Mermaid comes with Gradio, and the one that is installed here ({version}) has none.", version=version)
        )
    modules: dict[str, str] = {}
    wanted = list(found)
    while wanted:
        name = wanted.pop()
        path = scripts / name
        if name in modules or not path.is_file():
            continue
        text = _PRELOADED.sub("const __vite__mapDeps=()=>[];\n", path.read_text("utf-8"), count=1)
        modules[name] = _IMPORTED.sub(r"\1\2\1", text)
        # Of Gradio's page itself only helpers are used: what it would show isn't taken along.
        if not name.startswith("index-"):
            wanted += [imported for _, imported in _IMPORTED.findall(text)]
    return found[0], modules
