"""Said to be Any: reading what transformers lists lazily takes pyright 17 seconds."""

from typing import Any

def __getattr__(name: str) -> Any: ...
