"""How much the caches may hold, and whether they outlive the process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qwen35mm.errors import ConfigError

DEFAULT_DISK_BYTES = 8 << 30


@dataclass(frozen=True)
class CacheSettings:
    """Budgets in bytes; None lets `planner.plan_memory` choose from the memory that there is.

    Attributes:
        kv_bytes: KV of running sequences and cached segments together, on the model's device.
        state_bytes: cached checkpoints' conv and recurrent states, in host memory.
        vision_bytes: cached vision embeddings, in host memory.
        host_kv_bytes: KV of segments that had to leave a GPU's memory; a CPU's KV is in host memory anyway.
        directory: where checkpoints outlive the process; None keeps nothing on disk.
        disk_bytes: the most that the directory may hold.
        reuse: whether anything is kept after a request at all.
    """

    kv_bytes: int | None = None
    state_bytes: int | None = None
    vision_bytes: int | None = None
    host_kv_bytes: int | None = None
    directory: Path | None = None
    disk_bytes: int = DEFAULT_DISK_BYTES
    reuse: bool = True

    def __post_init__(self) -> None:
        for name in ("kv_bytes", "state_bytes", "vision_bytes", "host_kv_bytes", "disk_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ConfigError(f"{name} must be a number of bytes, 0 or more; got {value!r}.")
