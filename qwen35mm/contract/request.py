"""How a request for a reply is described."""

from __future__ import annotations

from typing import Literal

# What stays cached of a prompt: the points where a conversation continues; the same, but nothing on disk; the same,
# without a history that includes the reply; only what was asked for before; nothing.
Retain = Literal["conversation", "memory", "prompt", "shared", "nothing"]
