"""Addresses and paths that lead where nobody may: into this machine, its network and its files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from qwen35mm.server.errors import ApiError
from qwen35mm.server.fetch import fetch_media
from qwen35mm_preprocess import MediaLimits
from tests.security.canary import SECRET, Canary, canary
from tests.security.conftest import OpenFront
from tests.security.fronts import KEYS, Front

PICTURE = "image_url"
# Where this machine, its network, or what a provider keeps beside it can be called.
ADDRESSES = [
    *("http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://LOCALHOST.:{port}/"),
    *("http://localhost.localdomain:{port}/", "http://ip6-localhost:{port}/", "http://127.1:{port}/"),
    *("http://127.0.1:{port}/", "http://127.8.9.10:{port}/", "http://2130706433:{port}/"),
    *("http://017700000001:{port}/", "http://0177.0.0.1:{port}/", "http://0x7f000001:{port}/"),
    *("http://0x7f.0x0.0x0.0x1:{port}/", "http://127.0.0.1.:{port}/", "http://0:{port}/", "http://0.0.0.0:{port}/"),
    *("http://[::1]:{port}/", "http://[::]:{port}/", "http://[0:0:0:0:0:0:0:1]:{port}/"),
    *("http://[::ffff:127.0.0.1]:{port}/", "http://[::ffff:7f00:1]:{port}/", "http://[::127.0.0.1]:{port}/"),
    *("http://[::ffff:0:127.0.0.1]:{port}/", "http://[64:ff9b::127.0.0.1]:{port}/"),
    *("http://[64:ff9b:1::7f00:1]:{port}/", "http://[2002:7f00:1::]:{port}/", "http://[2001:0:7f00:1::]:{port}/"),
    *("http://[fe80::1%25lo]:{port}/", "http://[fc00::1]:{port}/", "http://[fec0::1]:{port}/"),
    *("http://[ff02::1]:{port}/", "http://\uff11\uff12\uff17.0.0.1:{port}/"),
    *("http://\u2460\u2461\u2466.0.0.1:{port}/", "http://127\u30020.0.1:{port}/", "http://%31%32%37.0.0.1:{port}/"),
    *("http://127.0.0.1%00.example.org:{port}/", "http://8.8.8.8@127.0.0.1:{port}/"),
    *("http://127.0.0.1:{port}\\@8.8.8.8/", "http://127.0.0.1:{port}#@8.8.8.8/", "http:\\\\127.0.0.1:{port}/"),
    *("http:/127.0.0.1:{port}/", "http:127.0.0.1:{port}/", "//127.0.0.1:{port}/", " http://127.0.0.1:{port}/"),
    *("http://127.0.0.1\t:{port}/", "http://user:password@127.0.0.1:{port}/", "HTTP://127.0.0.1:{port}/"),
    *("https://127.0.0.1:{port}/", "ftp://127.0.0.1:{port}/", "gopher://127.0.0.1:{port}/_GET%20/"),
    *("dict://127.0.0.1:{port}/", "ws://127.0.0.1:{port}/", "jar:http://127.0.0.1:{port}/!/a.png"),
    *("http://169.254.169.254/latest/meta-data/", "http://[fd00:ec2::254]/", "http://[::ffff:a9fe:a9fe]/"),
    *("http://2852039166/", "http://100.64.0.1/", "http://100.127.255.254/", "http://100.100.100.200/"),
    *("http://10.0.0.1/", "http://172.16.0.1/", "http://192.168.0.1/", "http://192.0.0.1/", "http://192.0.2.1/"),
    *("http://198.18.0.1/", "http://198.51.100.1/", "http://203.0.113.1/", "http://224.0.0.1/"),
    *("http://240.0.0.1/", "http://255.255.255.255/", "http://[2001:db8::1]/", "http://[100::1]/"),
]


@pytest.fixture(scope="module")
def nobodys() -> Iterator[Canary]:
    with canary() as found:
        yield found


def ask_about(client: httpx.Client, address: str, protocol: int) -> httpx.Response:
    """Has the model shown what is at an address, by one of three protocols."""
    shown: dict[str, Any] = {"type": PICTURE, PICTURE: {"url": address}}
    source: dict[str, Any] = {"type": "image", "source": {"type": "url", "url": address}}
    asked = [
        ("chat/completions", {"messages": [{"role": "user", "content": [shown]}], "max_tokens": 1}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", PICTURE: address}]}]}),
        ("messages", {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": [source]}]}),
    ]
    path, body = asked[protocol % 3]
    return client.post(f"/v1/{path}", json=body)


def test_the_server_fetches_nothing_of_this_machine_or_its_network(open_front: OpenFront, nobodys: Canary) -> None:
    nobodys.asked.clear()
    # The first by each protocol, since all of them have the same function read an address.
    asked = [*((ADDRESSES[0], protocol) for protocol in range(3)), *zip(ADDRESSES, itertools.count(), strict=False)]
    with open_front("serve").client() as client:
        for address, protocol in asked:
            answer = ask_about(client, address.replace("{port}", str(nobodys.port)), protocol)
            assert answer.status_code == 400, (address, answer.text)
            assert SECRET not in answer.content
            assert nobodys.asked == [], address


async def test_no_connection_to_one_of_them_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server says 400 as well if one of them just doesn't answer."""
    monkeypatch.setattr(httpx.AsyncClient, "send", None)
    for address in ADDRESSES:
        with pytest.raises(ApiError):
            await fetch_media(MediaLimits())(address.replace("{port}", "8000"), "here")


def test_the_page_is_nobodys_way_to_other_servers(open_front: OpenFront, nobodys: Canary) -> None:
    nobodys.asked.clear()
    url = f"http://127.0.0.1:{nobodys.port}/secret"
    ways = ["gradio_api/file=", "file=", "gradio_api/file/", "gradio_api/proxy=", "proxy=", "gradio_api/stream/"]
    with open_front("chat").client() as client:
        for way in ways:
            for address in (url, quote(url, safe="")):
                answer = client.get(f"/{way}{address}")
                assert (answer.status_code, nobodys.asked) == (404, []), way
                assert SECRET not in answer.content


def test_no_call_of_the_page_fetches_an_address(open_front: OpenFront, nobodys: Canary) -> None:
    nobodys.asked.clear()
    url = f"http://127.0.0.1:{nobodys.port}/a.png"
    files = [{"path": url, "url": url, "orig_name": "a.png", "meta": {"_type": "gradio.FileData"}}]
    with open_front("chat").client() as client:
        for path in ("call/chat", "run/chat", "api/chat", "call/v2/chat"):
            answer = client.post(f"/gradio_api/{path}", json={"data": ["What is it?", files, "", [], {}]})
            if answer.status_code == 200 and "event_id" in answer.json():
                answer = client.get(f"/gradio_api/{path}/{answer.json()['event_id']}")
            assert SECRET not in answer.content
    assert nobodys.asked == []


@pytest.fixture(scope="module")
def with_secrets(open_front: OpenFront) -> Front:
    """The server of a folder of media, beside which, and in which by links, is what isn't to be read."""
    front = open_front("serve")
    media, secret = front.folder / "media", front.folder / "media-not" / "secret.png"
    secret.parent.mkdir()
    secret.write_bytes(SECRET)
    (media / "out.png").symlink_to(secret)
    (media / "up").symlink_to(front.folder)
    os.mkfifo(media / "pipe.png")
    return front


_NAMES = [
    *("out.png", "up/keys", "up/media-not/secret.png", "pipe.png", "../keys", "../media-not/secret.png", "", ".", ".."),
    *("%2e%2e/keys", "..%2fkeys", "%252e%252e/keys", "..\\keys", "./../keys", "a/../../keys", "//../keys", "..;/keys"),
    *("keys%00.png", "../keys%00.png", "\0", "a" * 5000, "../" * 100 + "etc/passwd", "%ff", "%c0%ae%c0%ae/keys"),
    *("..\uff0fkeys", "\uff0e\uff0e/keys", "../keys?a.png", "../keys#a.png", "~/keys", "$HOME/keys"),
]


def test_no_file_but_those_under_the_media_root_is_read(with_secrets: Front) -> None:
    root = with_secrets.folder / "media"
    begins = (f"file://{root}/", f"file:{root}/", f"file://localhost{root}/", "file:")
    with with_secrets.client() as client:
        for number, (name, begin) in enumerate(itertools.product(_NAMES, begins)):
            answer = ask_about(client, begin + name, number)
            assert (answer.status_code, "no such file" in answer.text) == (400, True), (begin, name, answer.text)
            assert SECRET.decode() not in answer.text
            assert KEYS[0] not in answer.text


_UP = [
    *("../", "..%2f", "%2e%2e/", "%2e%2e%2f", "%252e%252e/", "..\\", "..%5c", "....//", "..;/", "%c0%ae%c0%ae/", "/"),
    *("%2f", "//", ".%00./", "..%00/", "\uff0e\uff0e/"),
]


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("chat", "/qwen35mm/web/"),
        ("chat", "/qwen35mm/samples/"),
        ("chat", "/qwen35mm/media/"),
        ("chat", "/static/"),
        ("chat", "/assets/"),
        ("chat", "/svelte/"),
        ("chat", "/pwa_icon/"),
        ("chat", "/gradio_api/file="),
        ("review", "/web/"),
        ("review", "/media/"),
        ("review", "/small/"),
        ("serve", "/v1/models/"),
    ],
)
def test_no_path_leads_out_of_what_is_served(name: Any, base: str, open_front: OpenFront) -> None:
    front = open_front(name)
    targets = ["etc/passwd", "pyproject.toml", "assets/demo/config.json", "demo/config.json", "review.jsonl", "keys"]
    lines = [f"{each}: {value}\r\n" for each, value in {"Host": front.host, **front.headers}.items()]
    for up in _UP:
        asked = b""
        for target in targets:
            path = quote(f"{base}{up * 6}{target}".encode(), safe="/%\\;=.")
            asked += f"GET {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode()
        told = b""
        with front.connect() as client:
            client.sendall(asked.removesuffix(b"\r\n") + b"Connection: close\r\n\r\n")
            while piece := client.recv(2**16):
                told += piece
        assert told.count(b"HTTP/1.1 4") >= 1, up
        for secret in (b"root:", b"[project]", b"text_config", KEYS[0].encode()):
            assert secret not in told, up
        assert not any(status in told for status in (b"HTTP/1.1 200", b"HTTP/1.1 5")), up
