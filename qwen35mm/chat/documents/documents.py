"""Text and PDF files and web pages as context of a message: detects them, reads their text, and renders pages.

PDFium is native code that isn't thread-safe, and it reads untrusted files; web pages are parsed by libxml2. So both run
in a child process (document_worker) with limits on memory and time. A file that crashes it only causes an error here.
"""

from __future__ import annotations

import codecs
import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from qwen35mm.chat.documents.encodings import decode, decode_as
from qwen35mm.errors import (
    DamagedDocumentError,
    DocumentError,
    DocumentTooLargeError,
    EncryptedDocumentError,
    NoTextError,
)
from qwen35mm.pools import Asker
from qwen35mm_preprocess.say import Saying, say, size

MAX_PDF_BYTES = 200 * 2**20
MAX_TEXT_CHARS = 4_000_000
# For the stored text of a PDF, with page numbers.
MAX_KEPT_TEXT_BYTES = 5 * MAX_TEXT_CHARS
# For a whole PDF.
PDF_TIMEOUT_S = 60.0

_HEAD_BYTES = 1 << 20
_MAX_NAME_CHARS = 120
_WORKER = Path(__file__).with_name("document_worker.py")
_PDF_MAGIC = b"%PDF-"
# PDF readers search this many bytes for the magic.
_PDF_MAGIC_REACH = 1024
# PDFium's characters for a hyphen at the end of a line.
_LINE_HYPHEN = re.compile("[\x02\ufffe]\n?")


def detect_document(path: Path, name: str) -> Literal["text", "pdf"] | None:
    """The kind of a file by its content; None if it is neither text nor PDF.

    Args:
        path: the stored file.
        name: the original name. Decides only for text with the magic of a PDF after other words.

    Raises:
        OSError: the file can't be read.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(_PDF_MAGIC):
        return "pdf"
    is_text = decode(head, final=len(head) < _HEAD_BYTES) is not None
    if _PDF_MAGIC in head[:_PDF_MAGIC_REACH] and (not is_text or name.lower().endswith(".pdf")):
        return "pdf"
    return "text" if is_text else None


def read_text(path: Path, *, max_bytes: int, name: str | None = None, encoding: str | None = None) -> tuple[str, str]:
    r"""The text of a file, with line ends "\n", and the name of its encoding.

    Args:
        max_bytes: largest size of the file.
        name: the file's name in messages; the name of `path` if None.
        encoding: one of `encodings.ENCODINGS`; detected if None.

    Raises:
        DocumentTooLargeError: the file is larger.
        DamagedDocumentError: it isn't text, or not in this encoding.
        DocumentError: it is empty.
        OSError: it can't be read.
    """
    name = _shown(name or path.name)
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise DocumentTooLargeError(
            say(
                "{name} is larger than the limit of {most}. Send the part that matters.",
                name=name,
                most=size(max_bytes),
            )
        )
    found = decode(data) if encoding is None else (decode_as(data, encoding) or "", encoding)
    if found is None:
        raise DamagedDocumentError(
            say(
                "{name} isn't text in any common encoding. Save it as plain text in UTF-8, or as PDF.",
                name=name,
            )
        )
    text, encoding = found
    if not text.strip():
        if data.strip() and decode_as(data, encoding) is None:
            raise DamagedDocumentError(
                say("{name} isn't text in {encoding}. Choose another encoding.", name=name, encoding=_shown(encoding))
            )
        raise DocumentError(say("{name} is empty.", name=name))
    return text.replace("\r\n", "\n").replace("\r", "\n"), encoding


def read_pdf_text(
    path: Path, *, max_pages: int, name: str | None = None, asker: Asker | None = None
) -> tuple[str, ...]:
    """The text of each page of a PDF; empty for a page that is a picture.

    Args:
        max_pages: the most pages it may have.
        name: the file's name in messages; the name of `path` if None.
        asker: if they leave, the work ends with a DamagedDocumentError that nobody sees.

    Raises:
        EncryptedDocumentError: the PDF needs a password.
        DocumentTooLargeError: it has too many bytes, pages or characters.
        NoTextError: no page has text.
        DamagedDocumentError: it can't be read.
    """
    name = _shown(name or path.name)
    with closing(
        _answers(path, name, {"task": "text", "max_pages": max_pages, "max_chars": MAX_TEXT_CHARS}, asker)
    ) as answers:
        num_pages = next(answers)[0]["num_pages"]
        if num_pages > max_pages:
            raise DocumentTooLargeError(
                say(
                    "{name} has {pages}, and at most {most} can be read. Send the pages that matter.",
                    name=name,
                    pages=_pages(num_pages),
                    most=max_pages,
                )
            )
        texts = [next(answers)[0]["text"].replace("\r\n", "\n").replace("\r", "\n") for _ in range(num_pages)]
    pages = tuple(_LINE_HYPHEN.sub("", text).replace("\0", "") for text in texts)
    if not any(page.strip() for page in pages):
        raise NoTextError(
            say(
                "{name} has no text: {pages}, all of them pictures. Send its pages as pictures.",
                name=name,
                pages=_pages(num_pages),
            )
        )
    return pages


def render_pdf_pages(
    path: Path, *, max_pages: int, max_side: int = 1568, name: str | None = None, asker: Asker | None = None
) -> Iterator[tuple[Image.Image, int]]:
    """Renders the first pages of a PDF lazily; yields each as an RGB picture with the PDF's number of pages.

    Args:
        max_pages: the most pages to render.
        max_side: most pixels of the longer side. A small page is rendered at 300 dots an inch, and stays smaller.
        name: the file's name in messages; the name of `path` if None.
        asker: if they leave, the work ends with a DamagedDocumentError that nobody sees.

    Raises:
        EncryptedDocumentError: the PDF needs a password.
        DocumentTooLargeError: it has too many bytes.
        DamagedDocumentError: it can't be rendered.
    """
    name = _shown(name or path.name)
    work = {"task": "render", "max_pages": max_pages, "max_side": max_side}
    with closing(_answers(path, name, work, asker)) as answers:
        num_pages = next(answers)[0]["num_pages"]
        for _ in range(min(num_pages, max_pages)):
            header, pixels = next(answers)
            picture = Image.frombytes(
                "RGB", (header["width"], header["height"]), pixels, "raw", "RGB", header["stride"]
            )
            yield picture, num_pages


@dataclass(frozen=True)
class WebPage:
    """What a person would read of a web page.

    Attributes:
        text: Markdown; its pictures are their descriptions.
        pictures: addresses, the first one stands for the page.
    """

    title: str
    text: str
    pictures: tuple[str, ...]


def can_read_web_pages() -> bool:
    """Whether the package that reads them is installed."""
    return importlib.util.find_spec("trafilatura") is not None


def read_web_page(path: Path, *, address: str, asker: Asker | None = None) -> WebPage:
    """The main text of a web page.

    Args:
        path: its HTML.
        address: where it was, for messages and for addresses that are relative to it.

    Raises:
        NoTextError: it has no text.
        DocumentError: it can't be read.
    """
    work = {"task": "web", "address": address, "max_chars": MAX_TEXT_CHARS}
    with closing(_answers(path, address, work, asker, package="trafilatura")) as answers:
        found = next(answers)[0]
    return WebPage(" ".join(found["title"].split()), found["text"], tuple(found["pictures"]))


def as_context(name: str, text: str) -> str:
    """A document for the prompt: its name, and its unchanged text between two fences of backticks.

    The fences are longer than any row of backticks in the text, so the text can't end them.
    """
    longest = max((len(row) for row in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    end = "" if text.endswith("\n") else "\n"
    return f"Document {_shown(name)}:\n{fence}\n{text}{end}{fence}\n"


def _shown(name: str) -> str:
    """A file's name in quotation marks: no path, no control characters, no quotation marks inside."""
    name = re.split(r"[/\\]", name)[-1]
    name = "".join(" " if not character.isprintable() or character in '"`' else character for character in name)
    name = " ".join(name.split()) or "document"
    return f'"{name if len(name) <= _MAX_NAME_CHARS else name[: _MAX_NAME_CHARS - 1] + "…"}"'


def _pages(num_pages: int) -> Saying:
    return say("{n} {n|page|pages}", n=num_pages)


def _answers(
    path: Path, name: str, work: dict[str, Any], asker: Asker | None, package: str = "pypdfium2"
) -> Generator[tuple[dict[str, Any], bytes], None, None]:
    """Yields a child process's answers about a file; kills the process at the end."""
    num_bytes = path.stat().st_size
    if num_bytes > MAX_PDF_BYTES:
        raise DocumentTooLargeError(
            say(
                "{name} has {size}; a PDF can have up to {most}. Send the pages that matter.",
                name=name,
                size=size(num_bytes),
                most=size(MAX_PDF_BYTES),
            )
        )
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise DocumentError(
            say("{name} can't be read here: it needs the package {package}.", name=name, package=package)
        )
    request = {**work, "path": str(path.resolve()), "packages": str(Path(found.origin).parent.parent)}
    # -I: neither this folder nor the environment affects the child's imports.
    process = subprocess.Popen(
        [sys.executable, "-I", str(_WORKER), json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    clock = threading.Timer(PDF_TIMEOUT_S, process.kill)
    clock.daemon = True
    clock.start()
    try:
        with (asker or Asker()).ending(process.kill):
            while True:
                line = process.stdout.readline()
                header: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {"error": "crashed"}
                num_pixel_bytes = header.get("stride", 0) * header.get("height", 0)
                pixels = process.stdout.read(num_pixel_bytes)
                if "error" in header or len(pixels) != num_pixel_bytes:
                    raise _error(header.get("error", "crashed"), name, is_web=package == "trafilatura")
                yield header, pixels
    finally:
        clock.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def _error(code: str, name: str, *, is_web: bool) -> DocumentError:
    if is_web:
        if code == "empty":
            return NoTextError(
                say("{name} has no text to read: it may be made by scripts, or need a login.", name=name)
            )
        return DamagedDocumentError(
            say(
                "{name} can't be read: it is damaged, or needs more memory or time than a web page may take.", name=name
            )
        )
    if code == "encrypted":
        return EncryptedDocumentError(
            say("{name} is locked with a password. Save a copy without one and send that.", name=name)
        )
    if code == "long":
        return DocumentTooLargeError(
            say(
                "{name} has more than {most} characters of text. Send the pages that matter.",
                name=name,
                most=MAX_TEXT_CHARS,
            )
        )
    if code in ("memory", "crashed"):
        return DamagedDocumentError(
            say(
                "{name} can't be read: it is damaged, or needs more memory or time than a PDF may take. Save "
                "it again from the program that made it, or send pictures of its pages.",
                name=name,
            )
        )
    return DamagedDocumentError(
        say("{name} isn't a PDF that can be read: it is damaged or cut off. Save or download it again.", name=name)
    )
