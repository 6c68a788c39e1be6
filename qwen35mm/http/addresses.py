"""Where a request comes from, as limits count it."""

from __future__ import annotations

import contextlib
import ipaddress
import os

from starlette.requests import HTTPConnection


def address_of(connection: HTTPConnection) -> str:
    """Where a request comes from. A network of IPv6 is one address: each customer of a provider has one at least.

    A Space's proxy says for whom it asks, behind whatever the client itself says. Elsewhere nobody is believed that but
    `HttpSettings.trusted_proxies`, whose word uvicorn has put in the client's place.
    """
    names = [connection.client.host] if connection.client else []
    if os.environ.get("SPACE_ID"):
        names = [*",".join(connection.headers.getlist("x-forwarded-for")).split(","), *names]
    found = []
    for name in reversed(names):
        with contextlib.suppress(ValueError):
            found.append(ipaddress.ip_address(name.strip()))
    # From the last on: proxies within a data centre have addresses of no public network.
    address = next((each for each in found if each.is_global), found[0] if found else None)
    return f"address {None if address is None else network_of(str(address))}"


def network_of(address: str) -> str:
    """An IPv4 address as it is, the network of an IPv6 address; another text as it is."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and not found.is_loopback:
        return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
    return str(found)
