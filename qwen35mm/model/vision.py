"""The vision tower: patches to embeddings of the decoder's width, one embedding for 2 x 2 patches.

An engine that decodes in between calls `embed`, some of the `blocks` at a time, and `merger` itself. The result is the
same wherever it cuts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from qwen35mm.config import VisionConfig
from qwen35mm.model.layers import Embedding, LayerNorm, Linear
from qwen35mm.model.rope import vision_cos_sin
from qwen35mm.model.weight_formats import Factory
from qwen35mm_kernels import select_backend

_LAYER_NORM_EPS = 1e-6
Rope = tuple[torch.Tensor, torch.Tensor]
# Learned positions of a frame's patches, [h * w, width] in the model's dtype, and cosines and sines of all patches.
Places = tuple[torch.Tensor, Rope]


class VisionAttention(nn.Module):
    """Full attention inside each frame: [P, width] -> [P, width]."""

    def __init__(self, config: VisionConfig, factory: Factory) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.ops = select_backend(factory.device)
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, factory, bias=True)
        self.proj = Linear(config.hidden_size, config.hidden_size, factory, bias=True)

    def forward(self, x: torch.Tensor, rope: Rope, num_frames: int) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q, k = (self.ops.apply_partial_rope(x, *rope) for x in (q, k))
        return self.proj(self.ops.vision_attention(q, k, v, num_frames).flatten(1))


class VisionMLP(nn.Module):
    """fc2(gelu(fc1(x))): the tower's own feed-forward network (tanh form of gelu)."""

    def __init__(self, config: VisionConfig, factory: Factory) -> None:
        super().__init__()
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size, factory, bias=True)
        self.linear_fc2 = Linear(config.intermediate_size, config.hidden_size, factory, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    """x + attn(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, config: VisionConfig, factory: Factory) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.hidden_size, _LAYER_NORM_EPS, factory)
        self.norm2 = LayerNorm(config.hidden_size, _LAYER_NORM_EPS, factory)
        self.attn = VisionAttention(config, factory)
        self.mlp = VisionMLP(config, factory)

    def forward(self, x: torch.Tensor, rope: Rope, num_frames: int) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), rope, num_frames)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nn.Module):
    """Joins the patches of each merge block: [P, width] -> [P / merge**2, out_hidden_size]."""

    def __init__(self, config: VisionConfig, factory: Factory) -> None:
        super().__init__()
        self.merged_dim = config.hidden_size * config.spatial_merge_size**2
        self.norm = LayerNorm(config.hidden_size, _LAYER_NORM_EPS, factory)
        self.linear_fc1 = Linear(self.merged_dim, self.merged_dim, factory, bias=True)
        self.linear_fc2 = Linear(self.merged_dim, config.out_hidden_size, factory, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x).view(-1, self.merged_dim)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class VisionTower(nn.Module):
    """Encodes an image or a video; each temporal patch of a video is a separate frame."""

    def __init__(self, config: VisionConfig, factory: Factory) -> None:
        super().__init__()
        self.config = config
        # A convolution whose stride is its kernel is a product with the flattened patch.
        self.patch_embed = Linear(config.patch_dim, config.hidden_size, factory, bias=True)
        self.pos_embed = Embedding(config.num_position_embeddings, config.hidden_size, factory)
        self.blocks = nn.ModuleList(VisionBlock(config, factory) for _ in range(config.depth))
        self.merger = PatchMerger(config, factory)

    @property
    def device(self) -> torch.device:
        return self.patch_embed.weight.device

    def places(self, grid_thw: tuple[int, int, int]) -> Places:
        """What depends on a grid alone."""
        config, weight = self.config, self.patch_embed.weight
        t, h, w = grid_thw
        rows, columns = patch_coordinates(h, w, config.spatial_merge_size, weight.device)
        positions = self._positions(rows, columns, h, w).to(weight.dtype)
        cos, sin = vision_cos_sin(rows, columns, config.rope_theta, config.hidden_size // config.num_heads)
        return positions, (cos.repeat(t, 1), sin.repeat(t, 1))

    def embed(
        self, pixel_values: torch.Tensor, grid_thw: tuple[int, int, int], places: Places | None = None
    ) -> tuple[torch.Tensor, Rope]:
        """Embeds a medium's patches and their positions.

        Args:
            pixel_values: [P, channels * temporal_patch * patch * patch], any float dtype, merge blocks first
                (transformers' order).
            grid_thw: (t, h, w) in patches; P is their product.
            places: the grid's, if they are there.

        Returns:
            [P, width], and cosines and sines [P, head_dim / 2] float32: the inputs of `blocks`, with t.

        Raises:
            ValueError: the patches don't fit the grid.
        """
        config, weight = self.config, self.patch_embed.weight
        t, h, w = grid_thw
        merge = config.spatial_merge_size
        if pixel_values.shape != (t * h * w, config.patch_dim):
            raise ValueError(
                f"pixel_values must be [{t * h * w}, {config.patch_dim}] for the grid {(t, h, w)}; "
                f"got {list(pixel_values.shape)}."
            )
        if h % merge or w % merge:
            raise ValueError(f"A grid's height and width must be multiples of {merge}; got {(t, h, w)}.")
        hidden = self.patch_embed(pixel_values.to(device=weight.device, dtype=weight.dtype))
        positions, rope = self.places(grid_thw) if places is None else places
        hidden += positions.repeat(t, 1)
        return hidden, rope

    @torch.inference_mode()
    def forward(self, pixel_values: torch.Tensor, grid_thw: tuple[int, int, int]) -> torch.Tensor:
        """The whole tower; arguments as for `embed`. Returns [P / merge**2, out_hidden_size]."""
        x, rope = self.embed(pixel_values, grid_thw)
        for block in self.blocks:
            x = block(x, rope, grid_thw[0])
        return self.merger(x)

    def _positions(self, rows: torch.Tensor, columns: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """The learned positions, resampled to a height x width grid: [h * w, tower width] float32."""
        indices, weights = interpolation_taps(rows, columns, height, width, self.config.grid_side)
        total = self.pos_embed(indices[0]) * weights[0][:, None]
        for index, weight in zip(indices[1:], weights[1:], strict=True):
            total += self.pos_embed(index) * weight[:, None]
        return total


def patch_coordinates(
    height: int, width: int, merge_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of a frame's patches in their order: merge blocks in raster order, raster inside a block.

    Args:
        height, width: the frame in patches, multiples of merge_size.

    Returns:
        rows and columns, each [height * width] int64.
    """
    blocks = (height // merge_size, merge_size, width // merge_size, merge_size)
    rows = torch.arange(height, device=device)[:, None].expand(height, width)
    columns = torch.arange(width, device=device)[None, :].expand(height, width)
    return rows.reshape(blocks).transpose(1, 2).flatten(), columns.reshape(blocks).transpose(1, 2).flatten()


def interpolation_taps(
    rows: torch.Tensor, columns: torch.Tensor, height: int, width: int, side: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bilinear resampling (corners aligned) of a side x side table to patches of a height x width frame.

    Equal to transformers' vision_utils.get_vision_interpolation_indices_and_weights.

    Returns:
        indices [4, P] int64 into the flattened table and weights [4, P] float32.
    """
    row_low, row_high, row_share = _axis_taps(rows, height, side)
    column_low, column_high, column_share = _axis_taps(columns, width, side)
    indices = [row * side + column for row in (row_low, row_high) for column in (column_low, column_high)]
    shares = [row * column for row in (1 - row_share, row_share) for column in (1 - column_share, column_share)]
    return torch.stack(indices), torch.stack(shares)


def _axis_taps(index: torch.Tensor, size: int, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The two neighbours of each position on one axis, and the second one's share."""
    source = index.float() * (side - 1) / max(size - 1, 1)
    low = source.floor()
    return low.long(), (low.long() + 1).clamp(max=side - 1), source - low
