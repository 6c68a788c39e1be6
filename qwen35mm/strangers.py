"""Whether strangers can reach a page. Nothing here needs the page's libraries."""

from __future__ import annotations

import ipaddress
import os


def is_shared(host: str) -> bool:
    """Whether a page on this address is for more people than the one at this machine.

    It is on a Hugging Face Space, and on every address that other machines may reach. With one cache for all, a person
    could tell by the clock which pictures others have asked about: each session gets a cache of its own then.
    """
    if os.environ.get("SPACE_ID"):
        return True
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, which may lead anywhere
        return True
