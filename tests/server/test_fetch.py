"""Media from addresses: of the internet only, within limits."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from qwen35mm.server import fetch
from qwen35mm.server.errors import ApiError
from qwen35mm.server.fetch import fetch_media
from qwen35mm_preprocess import MediaLimits
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
        "http://127.0.0.1/",
        "http://localhost/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[2002:7f00:1::]/",
        "http://10.0.0.1/",
        "http://169.254.169.254/latest/meta-data",
        "http://100.64.0.1/",
        "http://0.0.0.0/",
        "http://224.0.0.1/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://name:password@8.8.8.8/",
        "http:///",
        "http://8.8.8.8:99999/",
        "http://8.8.8.8:0/",
    ],
)
async def test_only_addresses_of_the_internet_are_read(address: str) -> None:
    with pytest.raises(ApiError, match=r"messages\.0 can't be fetched: ") as caught:
        await fetch_media(LIMITS)(address, "messages.0")
    assert "127.0.0.1" not in caught.value.message
    assert caught.value.status == 400


async def test_a_file_is_read_within_limits(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of the internet that leads to this machine, for the test alone; others are looked at as ever."""
    look = fetch._global_address

    async def resolve(host: str, number: int) -> str:
        return "127.0.0.1" if host == "files.example" else await look(host, number)

    monkeypatch.setattr(fetch, "_global_address", resolve)
    read = fetch_media(LIMITS)
    base = f"http://files.example:{port}"
    assert await read(f"{base}/file", "x") == await read(f"{base}/here", "x") == b"x" * 2000
    assert await read(f"{base}/host", "x") == f"files.example:{port}".encode()
    for path, words in (
        ("large", "more than the 0 MiB"),
        ("loop", "redirected more than 3"),
        ("inside", "isn't an address of the internet"),
        ("other", "only http and https"),
        ("packed", "its server packed it"),
        ("missing", "its server answered 404"),
    ):
        with pytest.raises(ApiError, match=words):
            await read(f"{base}/{path}", "x")
