"""Fetches files and pages from the internet, and only from there, within limits.

A name is looked up once, all its addresses must be global, and the connection goes to an address that was checked: the
name can't lead somewhere else in between. Redirects are followed here, with the same check for each.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from dataclasses import dataclass

import anyio
import httpx

from qwen35mm.errors import PromptError
from qwen35mm.http.bodies import hold
from qwen35mm.server.errors import ApiError
from qwen35mm.server.parts import Fetch
from qwen35mm_preprocess import MediaLimits
from qwen35mm_preprocess.say import decimal, said_of, say

MAX_REDIRECTS = 3
# For one file, redirects included.
TIMEOUT_S = 60.0
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GIVEN_OUT = ipaddress.IPv6Network("2000::/3")
# Addresses of each version that are tried.
_MOST_EACH = 2
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True)
class Fetched:
    """A file of the internet.

    Attributes:
        kind: its server's word for it, such as `text/html`; empty if it says nothing.
        address: where it was in the end.
    """

    data: bytes
    kind: str
    address: str


def fetch_media(limits: MediaLimits) -> Fetch:
    """Makes a function that fetches an address, up to the largest size of a medium."""
    max_bytes = limits.max_bytes(None)

    async def fetch(address: str, place: str) -> bytes:
        try:
            return (await fetch_public(address, max_bytes)).data
        except PromptError as error:
            raise ApiError(400, f"{place} can't be fetched: {error}.", place) from None

    return fetch


async def fetch_public(address: str, max_bytes: int) -> Fetched:
    """Fetches an address.

    Raises:
        PromptError: it isn't of the internet, too large, or can't be reached; the message is a reason in words, without
            a full stop.
    """
    try:
        with anyio.fail_after(TIMEOUT_S):
            return await _read(address, max_bytes)
    except TimeoutError:
        raise PromptError(say("it didn't come within {n} seconds", n=round(TIMEOUT_S))) from None
    except _RefusedError as error:
        raise PromptError(said_of(error)) from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError):
        # The library's messages may reveal what is in this network.
        raise PromptError(say("it can't be reached")) from None


class _RefusedError(Exception):
    """The address isn't fetched; the message says why."""


async def _read(address: str, max_bytes: int) -> Fetched:
    for _ in range(MAX_REDIRECTS + 1):
        url = httpx.URL(address)
        is_plain = url.scheme in ("http", "https") and url.host and not url.userinfo
        if not is_plain or url.port == 0 or (url.port or 0) > 65_535:
            raise _RefusedError(say("only http and https addresses without a password are read"))
        # Uses neither proxies nor passwords of this machine.
        async with httpx.AsyncClient(verify=_trusted(), trust_env=False, follow_redirects=False) as client:
            answer = await _open(client, url)
            try:
                if answer.status_code in _REDIRECTS:
                    address = str(url.join(answer.headers.get("location", "")))
                    continue
                if answer.status_code != 200:
                    raise _RefusedError(say("its server answered {status}", status=str(answer.status_code)))
                data = await _body(answer, max_bytes)
                return Fetched(data, answer.headers.get("content-type", "").partition(";")[0].strip().lower(), address)
            finally:
                await answer.aclose()
    raise _RefusedError(say("it was redirected more than {n} times", n=MAX_REDIRECTS))


@functools.cache
def _trusted() -> ssl.SSLContext:
    """The trusted certificate authorities. Read once: reading blocks the event loop for 30 ms."""
    return httpx.create_ssl_context(trust_env=False)


async def _open(client: httpx.AsyncClient, url: httpx.URL) -> httpx.Response:
    """Sends the request to an address that was checked; certificates are checked against the host's name."""
    host = url.netloc.decode("ascii")
    numbers = await _global_addresses(url.host, url.port or (443 if url.scheme == "https" else 80))
    for index, number in enumerate(numbers):
        request = client.build_request(
            "GET",
            url.copy_with(host=number),
            # Compressed data may unpack to a thousand times its size.
            headers={"host": host, "accept-encoding": "identity", "user-agent": "qwen35mm"},
            extensions={"sni_hostname": url.raw_host.decode("ascii")},
        )
        try:
            return await client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            # A network may have no way to addresses of IPv6, or a host be down at one of its addresses.
            if index == len(numbers) - 1:
                raise
    raise AssertionError("a name has an address")


async def _global_addresses(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(entry[4][0]) for entry in found]
    if not all(map(_is_of_the_internet, addresses)):
        raise _RefusedError(say("it isn't an address of the internet"))
    if not addresses:
        raise _RefusedError(say("it can't be reached"))
    # A name may list any number, to have others' ports tried; a network may have no way to one of the versions.
    found = {version: [each for each in addresses if each.version == version] for version in (4, 6)}
    tried = {*found[4][:_MOST_EACH], *found[6][:_MOST_EACH]}
    return [str(each) for each in dict.fromkeys(addresses) if each in tried]


def _is_of_the_internet(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    # An IPv6 address may contain an IPv4 address and lead to the same place.
    if address in _NAT64:
        return _is_of_the_internet(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    if address.sixtofour is not None:
        return _is_of_the_internet(address.sixtofour)
    # All of IPv6 that was ever allocated; Python calls much of the rest global, too.
    return address in _GIVEN_OUT and address.is_global


async def _body(answer: httpx.Response, max_bytes: int) -> bytes:
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise _RefusedError(say("its server compressed it"))
    body = bytearray()
    async for piece in answer.aiter_raw():
        body += piece
        hold(len(piece))
        if len(body) > max_bytes:
            most = decimal(max_bytes / 2**20, 0)
            raise _RefusedError(say("it has more than the {most} MiB that are taken", most=most))
    return bytes(body)
