"""OpenAI's embeddings: request bodies and answers."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from qwen35mm.contract import Event, PromptRead
from qwen35mm.server import fields
from qwen35mm.server.errors import ApiError
from qwen35mm.server.fields import STRICT
from qwen35mm.server.notes import Notes
from qwen35mm.server.openai.texts.inputs import Inputs

# Each with the values that ask for nothing.
REFUSED = {"pooling": ("last",), "normalize": (True,)}


class EmbeddingRequest(BaseModel):
    """The body of POST /v1/embeddings."""

    model_config = STRICT

    model: str | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    cache_salt: Annotated[str, Field(max_length=200)] | None = None
    # Describes the request; the model doesn't see it.
    user: str | None = None


def known_fields(body: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Drops null fields. Raises ApiError: 400, a field asks for other vectors than this model's."""
    return fields.known_fields(body, notes, hints={}, refused=REFUSED)


def check_dimensions(asked: int | None, hidden_size: int) -> None:
    """Raises ApiError 400 if `asked` isn't the size of the model's vectors."""
    if asked not in (None, hidden_size):
        raise ApiError(400, f"This model's vectors have {hidden_size:,} dimensions, and can't be cut.", "dimensions")


class VectorReader:
    """Reads the events of one embedding."""

    def __init__(self) -> None:
        self.read: PromptRead | None = None

    def take(self, event: Event) -> Iterator[object]:
        if isinstance(event, PromptRead):
            self.read = event
        return iter(())

    @property
    def vector(self) -> np.ndarray:
        """float32 `[hidden]`, normalized to length 1."""
        assert self.read is not None, "a stream ends with what was read"
        assert self.read.states is not None
        vector = self.read.states[0].double()
        return (vector / vector.norm()).float().numpy()


def whole(model: str, readers: Sequence[VectorReader], encoding: str) -> dict[str, Any]:
    """The whole answer, with the vectors in the order of their inputs."""
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(reader.vector, encoding)}
        for index, reader in enumerate(readers)
    ]
    num_tokens = sum(len(reader.read.token_ids) for reader in readers if reader.read is not None)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _encoded(vector: np.ndarray, encoding: str) -> str | list[float]:
    """A list, or the base64 of little-endian float32."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()
