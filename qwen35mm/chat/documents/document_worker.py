"""Script that runs PDFium and trafilatura in a child process: a crash, an endless loop or a bomb only ends that.

It imports nothing of qwen35mm. Its argument is JSON: the file's path, the folder of the package, and the work. Standard
output has one line of JSON for each page, followed by the pixels if pages are rendered (rows of `stride` bytes, RGB);
for a web page one line. An error is the line {"error": code}.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

MEMORY_BYTES = 2**30
CPU_S = 60
# Points are 1/72 inch: pages are rendered at 300 dots an inch at most.
MAX_SCALE = 300 / 72
# Neither part can run into the next picture's start, so a text full of such starts takes linear time.
_MARKDOWN_PICTURE = re.compile(r"!\[((?:\\.|[^\\\[\]\n]){0,500})\]\(([^\s()]{1,4000})\)")
# FPDF_GetLastError
_PASSWORD_CODES = (4, 5)


class WorkError(Exception):
    """Work that can't be done; its argument is a code that the parent knows."""


def main() -> None:
    work = json.loads(sys.argv[1])
    # Keeps what libraries print out of the answers.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _limit_process()
    sys.path.append(work["packages"])
    try:
        answers = {"text": _texts, "render": _renderings, "web": _web_page}[work["task"]](work)
        for header, pixels in answers:
            _answer(out, header, pixels)
    except WorkError as error:
        _answer(out, {"error": str(error)})
    except MemoryError:
        _answer(out, {"error": "memory"})
    except Exception:
        _answer(out, {"error": "damaged"})
    out.flush()
    # Skips PDFium's clean-up, which may crash on a damaged file.
    os._exit(0)


def _limit_process() -> None:
    try:
        import resource
    except ImportError:  # Windows: the parent's clock is the only limit.
        return
    for kind, limit in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


def _answer(out: BinaryIO, header: dict[str, Any], pixels: Any = b"") -> None:
    out.write(json.dumps(header).encode() + b"\n")
    out.write(pixels)
    out.flush()


def _opened(work: dict[str, Any]) -> Any:
    import pypdfium2

    try:
        return pypdfium2.PdfDocument(work["path"])
    except pypdfium2.PdfiumError as error:
        raise WorkError("encrypted" if error.err_code in _PASSWORD_CODES else "damaged") from error


def _texts(work: dict[str, Any]) -> Iterator[tuple[dict[str, Any], bytes]]:
    document = _opened(work)
    num_pages = len(document)
    yield {"num_pages": num_pages}, b""
    if num_pages > work["max_pages"]:
        return
    room = work["max_chars"]
    for index in range(num_pages):
        page = document[index]
        text_page = page.get_textpage()
        if text_page.count_chars() > room:
            raise WorkError("long")
        text = text_page.get_text_bounded()
        room -= len(text)
        yield {"text": text}, b""
        text_page.close()
        page.close()


def _renderings(work: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
    document = _opened(work)
    document.init_forms()
    yield {"num_pages": len(document)}, b""
    for index in range(min(len(document), work["max_pages"])):
        page = document[index]
        longest = max(page.get_size())
        # Half a pixel less, because sizes are rounded up.
        scale = min(MAX_SCALE, (work["max_side"] - 0.5) / longest)
        bitmap = page.render(scale=scale, rev_byteorder=True)
        header = {"width": bitmap.width, "height": bitmap.height, "stride": bitmap.stride}
        if bitmap.n_channels != 3 or max(bitmap.width, bitmap.height) > work["max_side"]:
            raise WorkError("damaged")
        yield header, bitmap.buffer
        bitmap.close()
        page.close()


def _web_page(work: dict[str, Any]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """A web page's title, main text in Markdown, and its pictures' addresses: the one that stands for it first."""
    import trafilatura

    with open(work["path"], "rb") as file:  # noqa: PTH123 - imports of pathlib take as long as the rest
        data = file.read()
    how = {"url": work["address"], "include_comments": False, "include_images": True, "include_tables": True}
    text = trafilatura.extract(data, output_format="markdown", **how)
    if not text:
        raise WorkError("empty")
    if len(text) > work["max_chars"]:
        raise WorkError("long")
    tree = trafilatura.load_html(data)
    about = None if tree is None else trafilatura.extract_metadata(tree, default_url=work["address"])
    title, picture = (about.title, about.image) if about else (None, None)
    pictures = [picture, *(match[2] for match in _MARKDOWN_PICTURE.finditer(text))]
    text = _MARKDOWN_PICTURE.sub(lambda match: f"[picture: {match[1]}]" if match[1] else "", text)
    addresses = _absolute(work["address"], filter(None, pictures))
    yield {"title": title or "", "text": text.strip(), "pictures": list(dict.fromkeys(addresses))}, b""


def _absolute(page: str, addresses: Iterable[str]) -> Iterator[str]:
    from urllib.parse import urljoin

    for address in addresses:
        # One that is none, such as http://[x/, is left out.
        with contextlib.suppress(ValueError):
            yield urljoin(page, address)


if __name__ == "__main__":
    main()
