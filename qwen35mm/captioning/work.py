"""What makes two pieces of work the same: the name under which a caption is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_ASKED_BYTES = 8


def work_key(content: bytes, question: str, system: str, settings: Mapping[str, Any]) -> bytes:
    """32 bytes; the same medium, asked the same of the same model under the same settings, has the same key.

    The first 8 bytes are the same for all media that are asked the same; see `asked_of`.

    Args:
        content: SHA-256 of the medium's bytes.
        question, system: with their placeholders filled.
        settings: what else decides a caption, the model's fingerprint among it; JSON values.
    """
    asked = hashlib.sha256(json.dumps([question, system, dict(settings)], sort_keys=True).encode()).digest()
    return asked[:_ASKED_BYTES] + hashlib.sha256(asked + content).digest()[_ASKED_BYTES:]


def asked_of(key: bytes) -> bytes:
    """The part of a key that says what was asked, whatever the medium."""
    return key[:_ASKED_BYTES]
