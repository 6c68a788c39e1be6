"""The sizes of the family's checkpoints that its kernels see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shapes:
    """The sizes of a checkpoint that its kernels see; with experts, of a mixture."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    v_heads: int
    vision_heads: int = 16
    vision_head_dim: int = 72
    k_heads: int = 16
    gdn_dim: int = 128
    head_dim: int = 256
    rotary_dim: int = 64
    experts: tuple[int, int, int] | None = None  # number, chosen, width

    @property
    def channels(self) -> int:
        return (2 * self.k_heads + self.v_heads) * self.gdn_dim


SHAPES = {
    shapes.name: shapes
    for shapes in (
        Shapes("0.8B", 1024, 8, 2, 16, vision_heads=12, vision_head_dim=64),
        Shapes("9B", 4096, 16, 4, 32),
        Shapes("27B", 5120, 24, 4, 48),
        Shapes("35B-A3B", 2048, 16, 2, 32, experts=(256, 8, 512)),
    )
}
