"""Whether strangers can reach a page. Nothing here needs the page's libraries."""

from __future__ import annotations

import ipaddress
import os


def is_shared(host: str) -> bool:
    """Whether a page on this address is open to more people than the one at this machine.

    True on a Hugging Face Space and on every address that other machines may reach. Each session then gets its own
    cache: with a shared one, people could tell by timing which pictures others have asked about.
    """
    if os.environ.get("SPACE_ID"):
        return True
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, which may lead anywhere
        return True
