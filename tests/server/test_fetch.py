"""Media from addresses: of the internet only, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from qwen35mm.assets import asset_path
from qwen35mm.contract import Image, Message, Text, Video
from qwen35mm.errors import MediaError, Qwen35mmError
from qwen35mm.model import LoadedModel
from qwen35mm.server import fetch, parts
from qwen35mm.server.errors import ApiError
from qwen35mm.server.fetch import fetch_media
from qwen35mm.server.notes import Notes
from qwen35mm.server.parts import Parts, Sources
from qwen35mm_preprocess import MediaLimits, MediaProcessor
from qwen35mm_preprocess.media import open_stream
from tests.http_server import QuietHandler, serving

LIMITS = MediaLimits(max_image_bytes=1000, max_video_bytes=2000)


class Files(QuietHandler):
    def do_GET(self) -> None:
        redirects = {"/here": "/file", "/loop": "/loop", "/inside": "http://127.0.0.1/", "/other": "ftp://a.example/"}
        if self.path in redirects:
            self.send_whole(302, b"", {"Location": redirects[self.path]})
        elif self.path == "/host":
            self.send_whole(200, self.headers["host"].encode())
        elif self.path == "/packed":
            self.send_whole(200, b"x", {"Content-Encoding": "gzip"})
        else:
            self.send_whole(*{"/file": (200, b"x" * 2000), "/large": (200, b"x" * 2001)}.get(self.path, (404, b"")))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    with serving(server):
        yield server.server_address[1]


@pytest.mark.parametrize(
    "address",
    [
        # One of each rule; tests/security has all forms of this machine and its network.
        *("http://127.0.0.1/", "http://localhost/", "http://[64:ff9b::a00:1]/", "http://[ff0e::1]/"),
        *("http://100.64.0.1/", "http://224.0.0.1/", "http://10.0.0.1/", "http://[2002:7f00:1::]/"),
        *("http://[::ffff:127.0.0.1]/", "http://[::1]/"),
        *("http://localhost:80\\@8.8.8.8/", "http://169.254.169.254/latest/meta-data", "http://name:password@8.8.8.8/"),
        *("http:///", "http://8.8.8.8:99999/", "http://8.8.8.8:0/"),
    ],
)
async def test_only_addresses_of_the_internet_are_read(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx.AsyncClient, "send", None)  # none of them is called
    with pytest.raises(ApiError, match=r"messages\.0 can't be fetched: ") as caught:
        await fetch_media(LIMITS)(address, "messages.0")
    assert "127.0.0.1" not in caught.value.message
    assert caught.value.status == 400


async def test_a_file_is_read_within_limits(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of the internet that leads to this machine, for the test alone; others are looked at as ever."""
    look = fetch._global_addresses

    async def resolve(host: str, number: int) -> list[str]:
        # Nobody answers at the first address.
        return ["127.0.0.9", "127.0.0.1"] if host == "files.example" else await look(host, number)

    monkeypatch.setattr(fetch, "_global_addresses", resolve)
    read = fetch_media(LIMITS)
    base = f"http://files.example:{port}"
    assert await read(f"{base}/file", "x") == await read(f"{base}/here", "x") == b"x" * 2000
    assert await read(f"{base}/host", "x") == f"files.example:{port}".encode()
    counted: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(fetch, "hold", counted.append)
        await read(f"{base}/file", "x")
    assert sum(counted) == 2000
    for path, words in (
        ("large", "more than the 0 MiB"),
        ("loop", "redirected more than 3"),
        ("inside", "isn't an address of the internet"),
        ("other", "only http and https"),
        ("packed", "its server compressed it"),
        ("missing", "its server answered 404"),
    ):
        with pytest.raises(ApiError, match=words):
            await read(f"{base}/{path}", "x")


async def test_an_address_within_another_one_counts_and_a_name_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    found: dict[str, list[str]] = {
        "plain": ["8.8.8.8"],
        "nat64": ["64:ff9b::808:808"],
        "sixtofour": ["2002:808:808::1"],
        "six": ["2606:4700::1111"],
        "many": ["2606:4700::1", "2606:4700::2", "2606:4700::3", "8.8.8.1", "8.8.8.2", "8.8.8.3"],
        "nat64-inside": ["64:ff9b::c0a8:1"],
        "nobodys": ["::7f00:1"],
        "one-inside": ["8.8.8.8", "192.168.0.1"],
        "nowhere": [],
    }

    async def look_up(_: object, host: str, port: int, **__: object) -> list[tuple[object, ...]]:
        asked.append(host)
        return [(0, 0, 0, "", (address, port)) for address in found[host]]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
    for host in ("plain", "nat64", "sixtofour", "six"):
        assert await fetch._global_addresses(host, 80) == found[host]
    many = found["many"]
    assert await fetch._global_addresses("many", 80) == [*many[:2], *many[3:5]], "two of each version"
    for host in ("nat64-inside", "nobodys", "one-inside", "nowhere"):
        with pytest.raises(fetch._RefusedError):
            await fetch._global_addresses(host, 80)
    assert asked == list(found)


async def test_a_request_may_not_have_any_number_of_addresses_fetched(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(address: str, place: str) -> bytes:
        return b"x" * 100

    media = MediaProcessor(demo.image_processing, demo.video_processing)
    reader = Parts(Sources(fetch=fetch), media, None, Notes())
    for _ in range(parts.MAX_FETCHED):
        assert await reader.source("https://a.example/", "here", "image", must_read=True) == b"x" * 100
    with pytest.raises(ApiError, match="at most 32 addresses"):
        await reader.source("https://a.example/", "here", "image", must_read=True)
    # Those of past turns count apart.
    assert await reader.source("https://a.example/", "here", "image", must_read=False) == b"x" * 100
    monkeypatch.setattr(parts, "MAX_FETCHED_BYTES", 250)
    reader = Parts(Sources(fetch=fetch), media, None, Notes())
    await reader.source("https://a.example/", "here", "image", must_read=True)
    await reader.source("https://a.example/", "here", "image", must_read=True)
    with pytest.raises(ApiError, match="are larger than") as caught:
        await reader.source("https://a.example/", "there", "image", must_read=True)
    assert (caught.value.status, caught.value.param) == (413, "there")


async def test_media_of_past_turns_that_cannot_be_fetched_are_left_out(demo: LoadedModel) -> None:
    picture = asset_path("samples").joinpath("one-shape.png").read_bytes()

    async def fetch(address: str, place: str) -> bytes:
        if address.endswith("gone"):
            raise ApiError(400, f"{place} can't be fetched: its server answered 404.", place)
        return picture

    notes = Notes()
    media = MediaProcessor(demo.image_processing, demo.video_processing)
    reader = Parts(Sources(fetch=fetch), media, None, notes)
    gone = [{"type": "image_url", "image_url": "https://a.example/gone"}]
    with pytest.raises(ApiError, match="answered 404"):
        await reader.content(gone, "here", must_read=True)
    (text,) = await reader.content(gone, "here", must_read=False)
    assert text == Text("[image left out: it can't be read here]")
    many = [{"type": "image_url", "image_url": f"https://a.example/{at}"} for at in range(parts.MAX_FETCHED)]
    *read, last = await reader.content(many, "there", must_read=False)
    assert last == text
    assert not any(isinstance(part, Text) for part in read)
    assert notes.header.startswith("here.0 can't be read; a text says so to the model | there.31 can't be read")
    # They leave room for the question's.
    assert len(await reader.content(many[:31], "question", must_read=True)) == 31


def test_a_file_is_one_under_the_root(demo: LoadedModel, tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "root-not" / "secret.png"
    for folder in (root / "in", secret.parent):
        folder.mkdir(parents=True)
    (root / "in" / "a b.png").write_bytes(b"a")
    secret.write_bytes(b"s")
    (root / "out.png").symlink_to(secret)
    (root / "within.png").symlink_to(root / "in" / "a b.png")
    (root / "loop.png").symlink_to(root / "loop.png")
    os.mkfifo(root / "pipe.png")
    for address in (
        f"file://{root}/in/a%20b.png",
        f"FILE://localhost{root}/in/../in/a b.png",
        f"file:{root}/within.png",
    ):
        assert parts._file(address, root, "here", "image") == (root / "in" / "a b.png").resolve()
    for name in (
        *("out.png", "loop.png", "pipe.png", "in", "", ".", "nothing.png", "../root-not/secret.png", "a%00b"),
        "a" * 5000,
        *("%2e%2e/root-not/secret.png", "..%2froot-not%2fsecret.png", "%252e%252e/root-not/secret.png", "IN/A B.PNG"),
        *("..\\root-not\\secret.png", "in/a%20b.png%3f"),
    ):
        with pytest.raises(ApiError, match="here: there is no such file under --media-root"):
            parts._file(f"file://{root}/{name}", root, "here", "image")
    for address in (
        *(f"file://example.org{root}/in/a%20b.png", f"file:///{secret}", "file:in/a%20b.png", "file:"),
        *("file:////server/share/a.png", "file:///%5c%5cserver/a.png", "file:%5c%5cserver%5ca.png"),
        "file:///etc/passwd",
    ):
        with pytest.raises(ApiError, match="there is no such file"):
            parts._file(address, root, "here", "image")


@pytest.mark.parametrize(
    "path", ["//server/share/a.png", "/%5c%5cserver/share", "%5c%5cserver%5cshare%5ca.png", "/%2fserver/a"]
)
def test_a_path_to_another_machine_is_not_even_looked_for(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows would tell the other machine who asks."""
    monkeypatch.setattr(Path, "resolve", lambda self, strict=False: pytest.fail(f"{self} was looked for"))
    with pytest.raises(ApiError, match="there is no such file"):
        parts._file(f"file://{path}" if path.startswith("/") else f"file:{path}", Path("/"), "here", "image")


FORMS = [
    *("data", "DATA", "Data", "data:", "DATA:", "Data:x", "dAtA:a.png", "DATA:a.png", "DATA:/../a.png"),
    *("data:/../a.png", "DATA:,/../../a.png", "data:image/png,a.png", "DATA:image/png;base64,a.png"),
    *("data:a.png;base64", " data:a.png", "data :a.png", "\tdata:a.png", "\ufeffdata:a.png", "da\tta:a.png"),
    *("data\x00:a.png", "ＤＡＴＡ:a.png", "data://a.png", "DATA://../a.png", "DATA:\\..\\a.png", "data%3Aa.png"),
    "a.png",
    *("./a.png", "../a.png", "~/a.png", "C:\\a.png", "\\\\server\\a.png", "//server/a.png", "/a.png", "file"),
    *("FILE", "https", "http", "", ":", ":a.png", "file:a.png", "fd:0", "FILE:DATA:a.png", "blob:a.png"),
    "jar:file:a.png",
    *("pathdata:a.png", "file:data", "file:///proc/self/environ"),
]
FIELDS = ("image_url", "video_url", "input_image", "input_video", "image")


# Each form in two of the fields, whose values one function reads.
@pytest.mark.parametrize(
    ("form", "field"), [(form, FIELDS[at % 5]) for number, form in enumerate(FORMS) for at in (number, number + 2)]
)
def test_what_a_request_says_is_never_a_path(
    form: str, field: str, demo: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder where each form names a file."""
    secret = asset_path("samples").joinpath("one-shape.png").read_bytes()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root").mkdir()
    for path in (Path(form), Path("DATA:", "x"), Path("data:", "x"), Path("..", "a.png"), Path("a.png"), Path("data")):
        with contextlib.suppress(OSError, ValueError):
            if not path.is_absolute() and path.resolve().is_relative_to(tmp_path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(secret)
    media = MediaProcessor(demo.image_processing, demo.video_processing)
    reader = Parts(Sources(tmp_path / "root"), media, None, Notes())
    try:
        part = asyncio.run(reader.part({"type": field, field: form}, "here", must_read=True))
    except (ApiError, Qwen35mmError):
        return
    assert isinstance(part, Image | Video)
    assert isinstance(part.source, str | bytes)
    with contextlib.suppress(MediaError), open_stream(part.source, None, MediaLimits()) as stream:
        assert stream.read() != secret
    # The second door, of conversations in other forms.
    try:
        Message.from_dict({"role": "user", "content": [{"type": "image", "image": form}]}, allow_paths=False)
    except Qwen35mmError:
        return
    assert form[:5].lower() == "data:"
