"""Prompts without a template, and conversations in the forms that scripts may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qwen35mm.contract.messages import Message

if TYPE_CHECKING:
    from typing_extensions import TypeIs

# A text, or token ids.
Plain = str | Sequence[int] | np.ndarray
Conversation = Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]]
# Which final hidden states make an embedding.
Pooling = Literal["last", "mean"]


def is_plain(given: object) -> TypeIs[Plain]:
    """Whether this is a text or token ids, not messages."""
    if isinstance(given, list | tuple):
        return not given or isinstance(given[0], int | np.integer)
    return isinstance(given, str | np.ndarray)
