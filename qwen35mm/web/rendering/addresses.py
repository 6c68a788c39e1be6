"""Draws an address for a phone's camera."""

from __future__ import annotations

import functools

import segno


@functools.cache
def draw_address(url: str | None) -> dict[str, str] | None:
    """An address with its QR code, as the address of a picture."""
    if url is None:
        return None
    # Cameras need the white around it, also on a dark page.
    return {"url": url, "qr": segno.make(url, micro=False).svg_data_uri(light="#fff", omitsize=True)}
