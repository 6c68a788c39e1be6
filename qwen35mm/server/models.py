"""Describes the model to clients: its names, its context length and what it reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from qwen35mm.backends.shelf import Offer
from qwen35mm.server.generation import ServedBackend


@dataclass(frozen=True)
class Listed:
    """A model as clients see it.

    Attributes:
        sees: whether it takes pictures and videos.
        parent: the model that it is an adapter of.
        state: whether it answers at once, and else why not: see `Shelf.state`.
        error: why it couldn't be loaded.
    """

    name: str
    context_length: int
    sees: bool
    parent: str | None = None
    state: str = "loaded"
    error: str | None = None


def listed(backend: ServedBackend, names: Iterable[str]) -> list[Listed]:
    """A loaded model by its own name, by further names, and with each adapter."""
    loaded = backend.loaded
    how = (backend.context_length, loaded.config.tower is not None)
    return [
        *(Listed(name, *how) for name in (loaded.name, *names)),
        *(Listed(name, *how, parent=loaded.name) for name in loaded.named_adapters),
    ]


def listed_offer(offer: Offer, names: Iterable[str], state: str, error: str | None) -> list[Listed]:
    """`listed` for a model that may not be loaded."""
    how = {"context_length": offer.context_length, "sees": offer.sees, "state": state, "error": error}
    return [
        *(Listed(name, **how) for name in (offer.name, *names)),
        *(Listed(name, **how, parent=offer.name) for name in offer.adapters),
    ]


def openai_model(model: Listed, created: int) -> dict[str, Any]:
    """In OpenAI's form. Other servers' clients look for the context length, the modalities and the state.

    Args:
        created: seconds since 1970.
    """
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "qwen35mm",
        "max_model_len": model.context_length,
        "context_length": model.context_length,
        "meta": {"n_ctx": model.context_length},
        "architecture": {
            "input_modalities": ["text", "image", "video"] if model.sees else ["text"],
            "output_modalities": ["text"],
        },
        # As llama-server's, where it has several models.
        "status": {"value": model.state} | ({} if model.error is None else {"error": model.error}),
        # As vLLM names an adapter's model.
        **({} if model.parent is None else {"parent": model.parent}),
    }


def anthropic_model(name: str, created: int) -> dict[str, Any]:
    """In Anthropic's form."""
    made = datetime.fromtimestamp(created, timezone.utc).isoformat().replace("+00:00", "Z")
    return {"id": name, "type": "model", "display_name": name, "created_at": made}


def anthropic_models(names: Sequence[str], created: int) -> dict[str, Any]:
    """All names, as one page of Anthropic's list."""
    data = [anthropic_model(name, created) for name in names]
    return {"data": data, "first_id": names[0], "last_id": names[-1], "has_more": False}
