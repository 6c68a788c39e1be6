"""Describes the model to clients: its names, its context length and what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from qwen35mm.server.generation import ServedBackend


def openai_model(backend: ServedBackend, name: str, created: int) -> dict[str, Any]:
    """In OpenAI's form. vLLM's, llama-server's and OpenRouter's clients look for the context length and modalities.

    Args:
        created: seconds since 1970.
    """
    length = backend.context_length
    reads = ["text"] if backend.loaded.config.tower is None else ["text", "image", "video"]
    # As vLLM names an adapter's model.
    parent = {"parent": backend.loaded.name} if name in backend.loaded.named_adapters else {}
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "qwen35mm",
        "max_model_len": length,
        "context_length": length,
        "meta": {"n_ctx": length},
        "architecture": {"input_modalities": reads, "output_modalities": ["text"]},
        **parent,
    }


def anthropic_model(name: str, created: int) -> dict[str, Any]:
    """In Anthropic's form."""
    made = datetime.fromtimestamp(created, timezone.utc).isoformat().replace("+00:00", "Z")
    return {"id": name, "type": "model", "display_name": name, "created_at": made}


def anthropic_models(names: Sequence[str], created: int) -> dict[str, Any]:
    """All names, as one page of Anthropic's list."""
    data = [anthropic_model(name, created) for name in names]
    return {"data": data, "first_id": names[0], "last_id": names[-1], "has_more": False}
