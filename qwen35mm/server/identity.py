"""What answers say about who gave them: the model's fingerprint, and the request's number."""

from __future__ import annotations

import functools
import hashlib
import uuid

from qwen35mm import __version__
from qwen35mm.model import LoadedModel


@functools.lru_cache(maxsize=32)
def _fingerprint(*parts: str) -> str:
    digest = hashlib.sha256("\n".join((__version__, *parts)).encode()).hexdigest()
    return f"fp_{digest[:10]}"


def system_fingerprint(loaded: LoadedModel, adapter: str | None = None) -> str:
    """Changes with the program's version, the model, its adapters, the chosen one and the format of its weights."""
    adapters = [*loaded.adapters, *([] if adapter is None else [loaded.named_adapters[adapter]])]
    return _fingerprint(loaded.name, loaded.weights, *(each.digest for each in adapters))


def request_id_header(path: str) -> tuple[str, str]:
    """The header that numbers an answer, in the form of its protocol."""
    number = uuid.uuid4().hex
    return ("request-id", f"req_{number}") if path.startswith("/v1/messages") else ("x-request-id", f"req_{number}")
