"""Routes for files: uploads, media, thumbnails, exports and imports."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import re
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, unquote, urlsplit

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

from qwen35mm.chat.documents.documents import (
    WebPage,
    detect_document,
    read_pdf_text,
    read_text,
    read_web_page,
    render_pdf_pages,
)
from qwen35mm.chat.documents.encodings import JUDGED
from qwen35mm.chat.documents.svg import is_svg, svg_as_png
from qwen35mm.chat.media.plans import admitted
from qwen35mm.chat.media.thumbnails import make_frame, make_thumbnail, media_type, shown_picture
from qwen35mm.chat.quotas import Usage
from qwen35mm.chat.replies.prompting import with_names
from qwen35mm.chat.replies.turns import Person
from qwen35mm.chat.store.archive import Imported, export_zip, import_zip
from qwen35mm.chat.store.markdown import export_markdown
from qwen35mm.chat.store.records import Attachment, file_name
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.chat.store.temporary import TemporaryChats
from qwen35mm.contract import Backend
from qwen35mm.decoding import asked_by
from qwen35mm.decoding.processor import check_picture_by, kind_by, picture_by
from qwen35mm.errors import NoTextError, NotFoundError, PromptError, Qwen35mmError, StorageError
from qwen35mm.http.requests import number_of, request, while_waited_for
from qwen35mm.http.sessions import HEADER
from qwen35mm.pools import ARCHIVES, DOCUMENTS, REQUESTS, STRIPS, THUMBNAILS, UPLOADS, Asker, Pool
from qwen35mm.server.fetch import Fetched, fetch_public
from qwen35mm.web.rendering.view import attachment_view, conversation_line
from qwen35mm.web.serving.examples import Sample
from qwen35mm.web.serving.people import People
from qwen35mm_preprocess import MediaError
from qwen35mm_preprocess.say import Said, decimal, said_of, say

T = TypeVar("T")

MAX_TEXT_BYTES = 4 * 2**20
MAX_PDF_PAGES = 2_000
MAX_PAGE_PICTURES = 32
# Of a web page, or of a file at a web address.
MAX_WEB_BYTES = 16 * 2**20
MAX_WEB_PICTURES = 4
_ICON_BYTES = 8 * 2**10
_MAX_ADDRESS_CHARS = 4_000
_PAGES = ("text/html", "application/xhtml+xml")
_DOWNLOAD_S = 60.0
# Uploaded files must not run scripts, nor be taken for another type.
_INERT = {"content-security-policy": "default-src 'none'; sandbox", "x-content-type-options": "nosniff"}
_SHOWN = {**_INERT, "cache-control": "private, max-age=31536000, immutable"}


class Files:
    """The routes for files.

    Args:
        backend: has the limits for files, and reads media.
        usage: checks the limits of a person.
        examples: shown on an empty page.
        reads_web: whether a person lets the program read web addresses.
        chats: the temporary conversations, if these are their files.
    """

    def __init__(
        self,
        store: ConversationStore,
        people: People,
        backend: Backend,
        usage: Usage,
        examples: Sequence[Sample] = (),
        chats: TemporaryChats | None = None,
        *,
        reads_web: Callable[[Person], bool] = lambda _: False,
    ) -> None:
        self._store = store
        self._people = people
        self._backend = backend
        self._usage = usage
        self._examples = examples
        self._chats = chats
        self._reads_web = reads_web
        self._downloads: dict[str, tuple[Person, float]] = {}
        self._thumbnail = functools.lru_cache(maxsize=256)(self._make_thumbnail)

    async def upload(self, request: Request) -> Response:
        """`POST .../upload?name=...` with a file as the body: returns its attachments for a message."""
        person = self._person(request, writes=True)
        if self._chats is not None:
            self._chats.heard(person.owner, None)
        name = file_name(request.query_params.get("name", ""))
        max_bytes = self._backend.media.limits.max_bytes(None)
        async with self._usage.receiving(person) as take, _received(request, repr(name), max_bytes, take) as file:
            attachment = await self._held(person, name, file, max_bytes)
        return JSONResponse(await self._attached(request, person, attachment))

    async def _held(self, person: Person, name: str, file: BinaryIO, max_bytes: int) -> Attachment:
        digest, num_bytes = await UPLOADS.run(self._store.media.add, file, max_bytes=max_bytes)
        await REQUESTS.run(self._store.media.hold, person.owner, digest)
        return Attachment(digest, "image", name, num_bytes)

    async def _attached(self, request: Request, person: Person, attachment: Attachment) -> dict[str, Any]:
        """The attachments for a message of a file that was received. Releases the file if it can't be used."""
        digest = attachment.digest
        try:
            found = await UPLOADS.run(self._recognise, person, attachment)
            if isinstance(found, Attachment):
                path = self._store.media.path(digest)
                found = replace(found, kind=await self._read(request, THUMBNAILS, person, kind_by, path))
                if found.kind == "image":
                    # Decodes all pixels, to report a truncated picture now and not after the question.
                    await self._read(request, THUMBNAILS, person, check_picture_by, path)
                found = {"attachments": [attachment_view(found)]}
            elif found == "svg":
                found = await self._drawing(request, person, attachment)
            elif found is None:
                found = await while_waited_for(
                    request, lambda asker: DOCUMENTS.run_for(person.line, self._pdf, person, attachment, asker)
                )
        except Exception as error:
            await REQUESTS.run(self._store.media.release, person.owner, digest)
            if isinstance(error, MediaError):
                raise type(error)(with_names(said_of(error), [attachment])) from None
            raise
        assert isinstance(found, dict)
        return found

    async def web_page(self, request: Request) -> Response:
        """`POST .../web_page?address=...`: the text and the pictures of a web page, or a file, as attachments."""
        person = self._person(request, writes=True)
        if not await REQUESTS.run(self._reads_web, person):
            raise PromptError(say("Web addresses aren't read here. The settings can allow it."))
        if self._chats is not None:
            self._chats.heard(person.owner, None)
        address = request.query_params.get("address", "")
        if len(address) > _MAX_ADDRESS_CHARS:
            raise PromptError(say("Web addresses of more than {most} characters aren't read.", most=_MAX_ADDRESS_CHARS))
        return JSONResponse(
            await while_waited_for(request, lambda asker: self._web_page(request, person, address, asker))
        )

    async def _web_page(self, request: Request, person: Person, address: str, asker: Asker) -> dict[str, Any]:
        # Each person's uploads and pages share one limit.
        async with self._usage.receiving(person) as take:
            try:
                fetched = await fetch_public(address, MAX_WEB_BYTES)
            except PromptError as error:
                why = said_of(error)
                raise PromptError(say("{address} can't be read: {why}.", address=address, why=why)) from None
            take(len(fetched.data))
            if fetched.kind not in _PAGES:
                name = file_name(unquote(urlsplit(fetched.address).path) or "page")
                file = await self._held(person, name, io.BytesIO(fetched.data), MAX_WEB_BYTES)
                return await self._attached(request, person, file)
            page = await DOCUMENTS.run_for(person.line, _read_page, fetched, asker)
            host = urlsplit(fetched.address).hostname or ""
            title = " ".join(page.title.replace("/", " ").split())[:80] or "page"
            name = file_name(f"{title} ({host})")
            text = f"{fetched.address}\n\n{page.text}"
            attachments = [await UPLOADS.run(self._keep, person, name, "text", text.encode())]
            for source in page.pictures[:MAX_WEB_PICTURES]:
                # What can't be had is left out: the text is what was asked for.
                with contextlib.suppress(Qwen35mmError):
                    attachments += await self._web_picture(request, person, source, take)
        return {"attachments": attachments}

    async def _web_picture(
        self, request: Request, person: Person, address: str, take: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        """A picture of a web page; nothing for a small one, which is an icon."""
        fetched = await fetch_public(address, self._backend.media.limits.max_bytes("image"))
        if not fetched.kind.startswith("image/") or len(fetched.data) < _ICON_BYTES:
            return []
        take(len(fetched.data))
        name = file_name(unquote(urlsplit(fetched.address).path) or "picture")
        held = await self._held(person, name, io.BytesIO(fetched.data), len(fetched.data))
        found = (await self._attached(request, person, held))["attachments"]
        pictures = [each for each in found if each["kind"] == "image"]
        used = {each[key] for each in pictures for key in ("digest", "svg") if key in each}
        for digest in {held.digest, *(each["digest"] for each in found)} - used:
            await REQUESTS.run(self._store.media.release, person.owner, digest)
        return pictures

    def _recognise(self, person: Person, attachment: Attachment) -> Attachment | dict[str, Any] | str | None:
        """Detects an upload by its content: returns text's attachments, "svg", None for a (slow) PDF, else the
        upload."""
        path = self._store.media.path(attachment.digest)
        kind = detect_document(path, attachment.name)
        if kind is None:
            return attachment
        if kind == "text" and is_svg(path):
            return "svg"
        return {"attachments": [self._sent_text(person, attachment)]} if kind == "text" else None

    def _sent_text(self, person: Person, attachment: Attachment) -> dict[str, Any]:
        found = self._text(person, attachment)
        if found["digest"] != attachment.digest and found["raw"] is None:
            self._store.media.release(person.owner, attachment.digest)
        return found

    def _text(self, person: Person, attachment: Attachment, encoding: str | None = None) -> dict[str, Any]:
        """Stores a file as UTF-8 text. If the encoding is a guess, holds the original, too, as `raw`."""
        path = self._store.media.path(attachment.digest)
        text, found = read_text(path, max_bytes=MAX_TEXT_BYTES, name=attachment.name, encoding=encoding)
        data = text.encode()
        if hashlib.sha256(data).hexdigest() == attachment.digest:
            view = attachment_view(replace(attachment, kind="text"))
        else:
            view = self._keep(person, attachment.name, "text", data)
        return {**view, "encoding": found, "raw": attachment.digest if encoding or found in JUDGED else None}

    async def _drawing(self, request: Request, person: Person, attachment: Attachment) -> dict[str, Any]:
        """A drawing as a picture, with the file itself as `svg`; as text if it can't be drawn."""
        path = self._store.media.path(attachment.digest)
        try:
            limits = self._backend.media.limits
            data = await self._read(request, THUMBNAILS, person, picture_by, path, svg_as_png, limits) or b""
        except MediaError as error:
            text = await UPLOADS.run(self._sent_text, person, attachment)
            return {"attachments": [text], "note": with_names(said_of(error), [attachment])}
        name = f"{Path(attachment.name).stem}.png"
        view = await UPLOADS.run(self._keep, person, name, "image", data)
        return {"attachments": [{**view, "svg": attachment.digest}]}

    async def recode(self, request: Request) -> Response:
        """`POST .../recode?digest=...&name=...&encoding=...`: reads an uploaded text file in another encoding."""
        person = self._person(request, writes=True)
        digest, name = request.query_params.get("digest", ""), file_name(request.query_params.get("name", ""))
        await REQUESTS.run(self._check_mine, person, digest)
        text = Attachment(digest, "text", name, 0)
        encoding = request.query_params.get("encoding", "")
        return JSONResponse({"attachments": [await UPLOADS.run(self._text, person, text, encoding)]})

    def _pdf(self, person: Person, attachment: Attachment, asker: Asker) -> dict[str, Any]:
        path = self._store.media.path(attachment.digest)
        try:
            pages = read_pdf_text(path, max_pages=MAX_PDF_PAGES, name=attachment.name, asker=asker)
        except NoTextError:
            return self._pages(person, attachment, asker)
        text = "\n\n".join(f"[page {number}]\n{page.strip()}" for number, page in enumerate(pages, start=1))
        found = self._keep(person, attachment.name, "text", text.encode())
        return {"attachments": [{**found, "pdf": attachment.digest, "num_pages": len(pages)}]}

    async def pdf_pages(self, request: Request) -> Response:
        """`POST .../pages?digest=...&name=...`: an uploaded PDF's pages as pictures."""
        person = self._person(request, writes=True)
        digest, name = request.query_params.get("digest", ""), file_name(request.query_params.get("name", ""))
        await REQUESTS.run(self._check_mine, person, digest)
        pdf = Attachment(digest, "image", name, 0)
        found = await while_waited_for(
            request, lambda asker: DOCUMENTS.run_for(person.line, self._pages, person, pdf, asker)
        )
        return JSONResponse(found)

    def _pages(self, person: Person, attachment: Attachment, asker: Asker) -> dict[str, Any]:
        path = self._store.media.path(attachment.digest)
        drawn = render_pdf_pages(path, max_pages=MAX_PAGE_PICTURES, name=attachment.name, asker=asker)
        attachments, note = [], None
        for picture, num_pages in drawn:
            data = io.BytesIO()
            picture.save(data, "PNG")
            name = f"{Path(attachment.name).stem}, page {len(attachments) + 1}.png"
            attachments.append(self._keep(person, name, "image", data.getvalue()))
            if num_pages > MAX_PAGE_PICTURES:
                note = say("Only {n} of {m} {m|page|pages} {n|is|are} used.", n=MAX_PAGE_PICTURES, m=num_pages)
        return {"attachments": attachments, "note": note}

    def _keep(self, person: Person, name: str, kind: Any, data: bytes) -> dict[str, Any]:
        self._usage.check(person, num_bytes=len(data))
        digest, num_bytes = self._store.media.add(io.BytesIO(data), max_bytes=len(data))
        self._store.media.hold(person.owner, digest)
        return attachment_view(Attachment(digest, kind, name, num_bytes))

    async def media(self, request: Request) -> Response:
        """`GET .../media/DIGEST`: a file of one of the person's messages."""
        path, _ = await self._mine(request)
        return FileResponse(path, media_type=await REQUESTS.run(media_type, path), headers=_SHOWN)

    async def picture(self, request: Request) -> Response:
        """`GET .../picture/DIGEST`: a picture in a format for browsers, upright, in original size."""
        path, person = await self._mine(request)
        limits = self._backend.media.limits
        data = await self._read(request, THUMBNAILS, person, picture_by, path, shown_picture, limits)
        return await self.media(request) if data is None else Response(data, media_type="image/jpeg", headers=_SHOWN)

    async def frame(self, request: Request) -> Response:
        """`GET .../frame/DIGEST?time_s=...`: a video's frame at a time, as a JPEG in original size."""
        path, person = await self._mine(request)
        try:
            time_s = float(request.query_params.get("time_s", "0"))
        except ValueError:
            raise PromptError(say("A frame's time is a number of seconds.")) from None
        limits = self._backend.media.limits
        data = await self._read(request, STRIPS, person, picture_by, path, make_frame, time_s, limits)
        return Response(data, media_type="image/jpeg", headers=_SHOWN)

    async def thumbnail(self, request: Request) -> Response:
        """`GET .../thumbnail/DIGEST`: a small JPEG of a file."""
        path, person = await self._mine(request)
        data = await THUMBNAILS.run_for(person.line, self._thumbnail, path)
        return Response(data, media_type="image/jpeg", headers=_SHOWN)

    async def poster(self, request: Request) -> Response:
        """`GET .../poster/NUMBER`: a small JPEG of an example; not every browser can play the clip itself."""
        number = number_of(request)
        if number not in range(len(self._examples)):
            raise NotFoundError(say("There is no such example."))
        data = await THUMBNAILS.run(self._thumbnail, self._examples[number].path)
        return Response(data, media_type="image/jpeg", headers=_INERT)

    @request
    async def download(self, person: Person) -> Any:
        """A code for one `export`. A ticket in an address opens single files, but never all conversations."""
        now_s = time.monotonic()
        self._downloads = {code: each for code, each in self._downloads.items() if each[1] > now_s}
        code = secrets.token_urlsafe(24)
        self._downloads[code] = (person, now_s + _DOWNLOAD_S)
        return {"code": code}

    async def export(self, request: Request) -> Response:
        """`GET .../export?ids=...&form=zip|md&code=...`: exports conversations; all of them without ids."""
        code = request.query_params.get("code", "")
        person, until_s = self._downloads.get(code, (None, 0.0))
        if request.method == "GET":
            self._downloads.pop(code, None)
        if person is None or until_s < time.monotonic():
            raise NotFoundError(say("This link worked for one download. Export from the page again."))
        ids = [each for each in request.query_params.get("ids", "").split(",") if each]
        store = self._store
        if request.query_params.get("form") == "md":
            conversation, tree = await REQUESTS.run(store.read, person.owner, ids[0] if ids else "")
            text = await ARCHIVES.run_for(person.line, export_markdown, tree, conversation.head, conversation.title)
            title = re.sub(r"[/\\]", "_", conversation.title) or "chat"
            return _download(text.encode(), f"{title}.md", "text/markdown; charset=utf-8")
        if not ids:
            ids = [each.id for each in await REQUESTS.run(store.find, person.owner, limit=100_000)]
        # On disk, since videos may be too large for memory.
        archive = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the response
        try:
            await ARCHIVES.run_for(person.line, export_zip, store, person.owner, ids, archive)
        except BaseException:
            archive.close()
            raise
        return _stream(archive, "qwen35mm-chats.zip", "application/zip")

    async def take_in(self, request: Request) -> Response:
        """`POST .../import` with an archive of `export` as the body."""
        person = self._person(request, writes=True)
        most = self._usage.quotas.archive_bytes
        async with self._usage.receiving(person) as take, _received(request, say("The archive"), most, take) as archive:
            taken = await ARCHIVES.run_for(person.line, self._import, person, archive)
        lines = [conversation_line(each) for each in taken.new]
        counts = {"num_extended": len(taken.extended), "num_known": taken.num_known}
        return JSONResponse({"conversations": lines, **counts})

    def _import(self, person: Person, archive: BinaryIO) -> Imported:
        media, processor, quotas = self._store.media, self._backend.media, self._usage.quotas
        self._usage.check(person, num_bytes=1)
        max_bytes, max_conversations = self._usage.room(person, most=quotas.archive_bytes)
        return import_zip(
            self._store,
            person.owner,
            archive,
            max_bytes=max_bytes,
            max_conversations=max_conversations,
            max_json_bytes=quotas.conversation_bytes,
            admit=lambda file: admitted(file, media.path(file.digest), processor),
        )

    def _make_thumbnail(self, path: Path) -> bytes | None:
        media = self._backend.media
        return picture_by(media, path, make_thumbnail, media.limits)

    async def _read(
        self, request: Request, pool: Pool, person: Person, read: Callable[..., T], path: Path, *more: Any
    ) -> T:
        """Runs `read` on a file where media are decoded; stops when the request's connection is lost."""

        def work(asker: Asker) -> T:
            return read(asked_by(self._backend.media, asker), path, *more)

        return await while_waited_for(request, lambda asker: pool.run_for(person.line, work, asker))

    async def _mine(self, request: Request) -> tuple[Path, Person]:
        """The path of the requested file, and the person who asks for it."""
        digest, person = request.path_params["digest"], self._person(request)
        await REQUESTS.run(self._check_mine, person, digest)
        path = self._store.media.path(digest)
        if not await REQUESTS.run(path.is_file):
            raise NotFoundError(say("This file is no longer stored."))
        return path, person

    def _check_mine(self, person: Person, digest: str) -> None:
        if not self._store.media.is_of(person.owner, digest):
            raise NotFoundError(say("You have no such file."))

    def _person(self, request: Request, *, writes: bool = False) -> Person:
        if writes and HEADER not in request.headers:
            raise NotFoundError(say("There is no such request."))
        return self._people.asking(request)


def _read_page(fetched: Fetched, asker: Asker) -> WebPage:
    with tempfile.TemporaryDirectory(prefix="qwen35mm-web-") as folder:
        path = Path(folder, "page")
        path.write_bytes(fetched.data)
        return read_web_page(path, address=fetched.address, asker=asker)


def _download(data: bytes, name: str, kind: str) -> Response:
    return Response(data, media_type=kind, headers={**_INERT, "content-disposition": _as_file(name)})


def _stream(archive: Any, name: str, kind: str) -> Response:
    size = archive.tell()
    archive.seek(0)
    return StreamingResponse(
        iter(lambda: archive.read(1 << 20), b""),
        media_type=kind,
        headers={**_INERT, "content-disposition": _as_file(name), "content-length": str(size)},
        background=BackgroundTask(archive.close),
    )


def _as_file(name: str) -> str:
    return f"attachment; filename*=UTF-8''{quote(file_name(name), safe='')}"


@contextlib.asynccontextmanager
async def _received(
    request: Request, what: Said, max_bytes: int, take: Callable[[int], None]
) -> AsyncIterator[BinaryIO]:
    """The request's body as a temporary file, deleted after the block. No thread waits for a slow upload.

    Args:
        take: called with the number of bytes of each chunk; may raise to refuse it.

    Raises:
        PromptError: the body is larger than `max_bytes`.
        StorageError: the disk is full.
        ClientDisconnect: the connection was lost.
    """
    too_large = PromptError(
        say("{what} is too large: the limit is {most} MiB.", what=what, most=decimal(max_bytes / 2**20, 0))
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    with tempfile.TemporaryFile() as file:
        num_bytes = 0
        try:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise too_large
                take(len(chunk))
                await UPLOADS.run(file.write, chunk)
            file.seek(0)
        except OSError:
            raise StorageError(say("The disk is full or failed, so the file was not saved. Free some space.")) from None
        yield file
