"""The vision tower's part of config.json."""

from __future__ import annotations

from dataclasses import dataclass, fields

from qwen35mm.config.section import Section

# A constant of the architecture (transformers' default_theta), which older files leave out.
_VISION_ROPE_THETA = 10000.0


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int
    out_hidden_size: int
    rope_theta: float = _VISION_ROPE_THETA

    @property
    def patch_dim(self) -> int:
        """Numbers in one flattened patch: channels x frames x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def grid_side(self) -> int:
        """Side of the square grid of learned positions."""
        return round(self.num_position_embeddings**0.5)


def read_vision(section: Section) -> VisionConfig:
    section.require("hidden_act", "gelu_pytorch_tanh", default=None)
    section.require_empty("deepstack_visual_indexes")
    theta = _VISION_ROPE_THETA
    if section.data.get("rope_parameters") is not None:
        rope = section.section("rope_parameters")
        if rope.data.get("rope_type", "axial") not in ("axial", "default"):
            raise rope.error("rope_type", f"is {rope.data['rope_type']!r}; only 'axial' is.")
        theta = rope.number("rope_theta")
    sizes = section.integers(*(field.name for field in fields(VisionConfig) if field.name != "rope_theta"))
    vision = VisionConfig(**sizes, rope_theta=theta)
    if vision.hidden_size % (4 * vision.num_heads):
        what = f"({vision.hidden_size}) must be a multiple of 4 x num_heads ({4 * vision.num_heads})."
        raise section.error("hidden_size", what)
    if vision.grid_side**2 != vision.num_position_embeddings:
        raise section.error("num_position_embeddings", f"must be a square; got {vision.num_position_embeddings}.")
    return vision
