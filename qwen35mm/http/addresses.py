"""The sender's address, as limits count it."""

from __future__ import annotations

import contextlib
import ipaddress
import os

from starlette.requests import HTTPConnection


def address_of(connection: HTTPConnection) -> str:
    """The sender's address. An IPv6 network counts as one, since every customer of a provider has a whole network.

    A Space's proxy appends its client's address to whatever the client sent. Elsewhere only
    `HttpSettings.trusted_proxies` are trusted; uvicorn has already taken the client from their headers.
    """
    names = [connection.client.host] if connection.client else []
    if os.environ.get("SPACE_ID"):
        names = [*",".join(connection.headers.getlist("x-forwarded-for")).split(","), *names]
    found = []
    for name in reversed(names):
        with contextlib.suppress(ValueError):
            found.append(ipaddress.ip_address(name.strip()))
    # From the end: proxies inside a data centre have private addresses.
    address = next((each for each in found if each.is_global), found[0] if found else None)
    return f"address {None if address is None else network_of(str(address))}"


def network_of(address: str) -> str:
    """An IPv4 address unchanged, an IPv6 address's network; any other text unchanged."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and not found.is_loopback:
        return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
    return str(found)
