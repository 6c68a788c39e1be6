"""The page with its scripts as one file and its styles as another: on a slow line each request costs a round trip.

There is no build: the files are joined when the page is first asked for, and again after one of them has changed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_STYLES = re.compile(r'^ *<link rel="stylesheet" href="(\S+)">\n', re.MULTILINE)
_SCRIPT = re.compile(r'^( *)<script type="module" src="(\S+)">', re.MULTILINE)
_IMPORT = re.compile(r'^import \{([^}]*)\} from "(\.[^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|class|const) (\w+))", re.MULTILINE)
# Lines of comments only; a third of what is sent.
_COMMENT = re.compile(r"^[ \t]*(?://.*|/\*\*(?:(?!\*/)[\s\S])*\*/)[ \t]*$", re.MULTILINE)
_OTHER = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)
_FOR_EVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class Script:
    """Modules joined into one.

    Attributes:
        text: the module.
        lines: its source map: what a browser's tools show the modules by.
        modules: their paths, each after those that it imports.
    """

    text: str
    lines: str
    modules: list[str]


def join_modules(folder: Path, entry: str) -> Script:
    """Joins a module and all that it imports: each becomes a function that returns what the module exports.

    Args:
        folder: where the modules are.
        entry: the path of the first one, in the folder.

    Raises:
        ValueError: a module has another kind of import or export than this can join, or imports itself.
    """
    order: list[str] = []
    parts = ["const modules = {};"]
    sections = []
    open_modules: list[str] = []

    def add(path: str) -> None:
        if path in open_modules:
            raise ValueError(f"{path} imports itself: {' > '.join([*open_modules, path])}")
        if path in order:
            return
        open_modules.append(path)
        text = (folder / path).read_text("utf-8")

        def imported(found: re.Match[str]) -> str:
            other = (folder / path).parent.joinpath(found[2]).resolve().relative_to(folder.resolve()).as_posix()
            add(other)
            return f'const {{{found[1].replace(" as ", ": ")}}} = modules["{other}"];'

        body = _IMPORT.sub(imported, _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text))
        exports = _EXPORT.findall(body)
        body = _EXPORT.sub("", body).replace("import.meta.url", f'new URL("{path}", import.meta.url)')
        if other := _OTHER.search(body):
            raise ValueError(f"{path} can't be joined with other modules: {other[0]}")
        num_lines = body.count("\n") + 1
        start = sum(part.count("\n") + 1 for part in parts) + 1
        # Line by line.
        lines = {"version": 3, "sources": [path], "names": [], "mappings": "AAAA" + ";AACA" * (num_lines - 1)}
        sections.append({"offset": {"line": start, "column": 0}, "map": lines})
        parts.append(f'modules["{path}"] = (() => {{\n{body}\nreturn {{ {", ".join(exports)} }};\n}})();')
        open_modules.pop()
        order.append(path)

    add(entry)
    return Script("\n".join(parts), json.dumps({"version": 3, "sections": sections}), order)


class Bundles:
    """Serves a page and what it loads.

    Args:
        folder: has the page, `index.html`, and its scripts and styles.
        base: the folder's path in the page's addresses, with a slash at its end.
    """

    def __init__(self, folder: Path, base: str) -> None:
        self._folder = folder
        self._base = base
        self._made: tuple[int, str, dict[str, tuple[str, bytes]]] = (0, "", {})

    def routes(self) -> list[Route]:
        """The page at `/`, and its joined files below `base`."""
        files = ("page.css", "page.js", "page.js.map")
        return [
            Route("/", self._show("index.html")),
            *(Route(f"/{self._base}{each}", self._show(each)) for each in files),
        ]

    def _show(self, name: str) -> Callable[[Request], Response]:
        def show(request: Request) -> Response:
            version, files = self._now()
            kind, packed = files[name]
            # A page from before an update may ask for the version before.
            cache_control = _FOR_EVER if request.url.query == version else "no-cache"
            headers = {"content-type": kind, "cache-control": cache_control, "vary": "accept-encoding"}
            if "gzip" in request.headers.get("accept-encoding", ""):
                return Response(packed, headers={**headers, "content-encoding": "gzip"})
            return Response(gzip.decompress(packed), headers=headers)

        return show

    def _now(self) -> tuple[str, dict[str, tuple[str, bytes]]]:
        """The version, and the type and the packed content of each file."""
        stamp = hash(frozenset((path, path.stat().st_mtime_ns) for path in self._folder.rglob("*")))
        if stamp != self._made[0]:
            kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "map": "application/json"}
            version, texts = self._make()
            files = {
                name: (f"{kinds[name.rpartition('.')[2]]}; charset=utf-8", gzip.compress(text.encode(), 9))
                for name, text in texts.items()
            }
            self._made = (stamp, version, files)
        return self._made[1:]

    def _make(self) -> tuple[str, dict[str, str]]:
        page = (self._folder / "index.html").read_text("utf-8")
        styles = "".join((self._folder / self._within(each)).read_text("utf-8") for each in _STYLES.findall(page))
        found = _SCRIPT.search(page)
        assert found is not None
        script = join_modules(self._folder, self._within(found[2]))
        version = hashlib.sha256(f"{styles}{script.text}".encode()).hexdigest()[:16]
        # A new version has a new address, so that a browser may keep each for ever.
        link = rf'\1<link rel="stylesheet" href="{self._base}page.css?{version}">'
        tag = rf'\1<script type="module" src="{self._base}page.js?{version}">'
        return version, {
            "index.html": _SCRIPT.sub(f"{link}\n{tag}", _STYLES.sub("", page)),
            "page.css": styles,
            "page.js": f"{script.text}\n//# sourceMappingURL=page.js.map?{version}\n",
            "page.js.map": script.lines,
        }

    def _within(self, address: str) -> str:
        assert address.startswith(self._base)
        return address.removeprefix(self._base)
