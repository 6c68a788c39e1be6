"""The vision tower's part of config.json."""

from __future__ import annotations

from dataclasses import dataclass

from qwen35mm.config.section import Section
from qwen35mm.errors import ConfigError

# A constant of the architecture (transformers' default_theta), not a size: older files leave it out.
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
    if section.data.get("deepstack_visual_indexes"):
        raise ConfigError(f"config.json: {section.name}deepstack_visual_indexes must be empty: it isn't supported.")
    theta = _VISION_ROPE_THETA
    if section.data.get("rope_parameters") is not None:
        rope = section.section("rope_parameters")
        if rope.data.get("rope_type", "axial") not in ("axial", "default"):
            raise ConfigError(f"config.json: {rope.name}rope_type is {rope.data['rope_type']!r}; only 'axial' is.")
        theta = rope.number("rope_theta")
    names = (
        "depth", "hidden_size", "intermediate_size", "num_heads", "in_channels", "patch_size", "temporal_patch_size",
        "spatial_merge_size", "num_position_embeddings", "out_hidden_size",
    )  # fmt: skip
    vision = VisionConfig(**{name: section.integer(name) for name in names}, rope_theta=theta)
    if vision.hidden_size % (4 * vision.num_heads):
        raise ConfigError(
            f"config.json: {section.name}hidden_size ({vision.hidden_size}) must be a multiple of "
            f"4 x num_heads ({4 * vision.num_heads})."
        )
    if vision.grid_side**2 != vision.num_position_embeddings:
        count = vision.num_position_embeddings
        raise ConfigError(f"config.json: {section.name}num_position_embeddings must be a square; got {count}.")
    return vision
