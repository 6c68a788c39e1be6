"""The forward pass of training: transformers' modules and parameters, with packed rows and fewer operations.

Several conversations lie in one row (`segments`: 0 is padding), so that nothing is computed for padding: attention sees
its own segment only, the gated delta rule's state is forgotten where a segment begins, and three zeros between segments
keep the convolution apart. Spans of any sizes go through the vision tower together.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch.nn import functional as F
from transformers import Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5 import modeling_qwen3_5

from training.media import pixel_values

qwen: Any = modeling_qwen3_5

CHUNK = 32
GAP = 3  # zeros between two segments: the convolution's taps less one
_FORGET = -30.0  # a decay in log space that leaves 1e-13 of a state
_SQUARED = 8  # the largest triangular matrices that are inverted by squaring


def text_states(
    model: Qwen3_5ForConditionalGeneration, embeds: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], Any, torch.Tensor]:
    """Runs the decoder: embeds [B, T, H], positions [3, B, T] and segments [B, T] -> last hidden states [B, T, H].

    Also returns the states after the first layer of full attention and before the last one, and what the MTP layer
    takes: the rotary cosine and sine, and the attention mask.
    """
    decoder: Any = model.model.language_model
    rotary = decoder.rotary_emb(embeds, positions)
    same = segments[:, :, None] == segments[:, None, :]
    mask = same.tril()[:, None]
    seen = _spans(segments) if on_processor(embeds) else mask
    real = (segments > 0)[..., None]
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    hidden = early = late = embeds
    for layer in decoder.layers:
        is_full = not hasattr(layer, "linear_attn")
        late = hidden if is_full else late
        hidden = _layer(layer, hidden, real, begins, rotary, seen)
        early = hidden if is_full and early is embeds else early
    return decoder.norm(hidden), (early, late), rotary, mask


def _layer(
    layer: Any, hidden: torch.Tensor, real: torch.Tensor, begins: torch.Tensor, rotary: Any, seen: Any
) -> torch.Tensor:
    if hasattr(layer, "linear_attn"):
        mixed = _gated_delta_net(layer.linear_attn, layer.input_layernorm(hidden) * real, begins)
    else:
        mixed = _attention(layer.self_attn, layer.input_layernorm(hidden), rotary, seen)
    hidden = hidden + mixed
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def compile_layers() -> None:
    """From now on a decoder's layers are compiled: one graph for each kind of layer and shape of batch.

    On a card most of a step is memory traffic between small operations, which a compiled layer has a third of.
    """
    global _layer
    _layer = torch.compile(_layer, dynamic=False)


def vision_tokens(model: Qwen3_5ForConditionalGeneration, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Merged tokens of spans of any sizes: pixels uint8 [patches, 1536], grids [spans, 3] -> [merged tokens, H]."""
    tower: Any = model.model.visual
    weight = tower.patch_embed.proj.weight
    # A 3-D convolution whose stride is its kernel is one matrix product.
    hidden = F.linear(
        pixel_values(pixels).to(weight.dtype), weight.view(weight.shape[0], -1), tower.patch_embed.proj.bias
    )
    places, weights = qwen.get_vision_interpolation_indices_and_weights(
        grids,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.config.spatial_merge_size,
        kwargs={},
    )
    hidden = hidden + (tower.pos_embed(places) * weights[:, :, None]).sum(1).to(hidden.dtype)
    positions = qwen.get_vision_position_ids(grids, tower.spatial_merge_size, kwargs={})
    rotary = tower.rotary_pos_emb(hidden, positions)
    lengths = grids.prod(1).tolist()
    for block in tower.blocks:
        hidden = hidden + _vision_attention(block.attn, block.norm1(hidden), lengths, rotary)
        hidden = hidden + block.mlp(block.norm2(hidden))
    return tower.merger(hidden)


def on_processor(tensor: torch.Tensor) -> bool:
    """Whether operations cost what they compute; on a card, what counts is how many there are."""
    return tensor.device.type == "cpu"


def _vision_attention(attn: Any, hidden: torch.Tensor, lengths: list[int], rotary: Any) -> torch.Tensor:
    """Attention within spans of these lengths, [patches, hidden]."""
    qkv = attn.qkv(hidden).reshape(len(hidden), 3, attn.num_heads, attn.head_dim)
    q, k, v = qkv.unbind(1)
    q, k = qwen.apply_rotary_pos_emb_vision(q, k, *rotary)
    attend = _attend_runs if on_processor(hidden) else _attend_padded
    return attn.proj(attend(q, k, v, lengths, attn.scaling).flatten(1))


def _attend_runs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float) -> torch.Tensor:
    """[patches, heads, width] -> the same: neighbours of one length go together."""
    runs: list[list[int]] = []
    for length in lengths:
        if runs and runs[-1][0] == length:
            runs[-1][1] += 1
        else:
            runs.append([length, 1])
    sizes = [length * count for length, count in runs]
    outs = []
    for (length, count), *parts in zip(runs, *(x.split(sizes) for x in (q, k, v)), strict=True):
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in parts)
        outs.append(_attend(q, k, v, scale).transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


def _attend_padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float) -> torch.Tensor:
    """As `_attend_runs`, with all spans in one call, each filled up to the longest."""
    sizes = torch.tensor(lengths, device=q.device)
    longest = max(lengths) + -max(lengths) % 16
    real = torch.arange(longest, device=q.device) < sizes[:, None]
    places = real.flatten().nonzero()[:, 0]
    rows = torch.zeros(3, real.numel(), *q.shape[1:], dtype=v.dtype, device=v.device)
    rows = rows.index_copy(1, places, torch.stack([q.to(v.dtype), k.to(v.dtype), v]))
    q, k, v = rows.unflatten(1, real.shape).transpose(2, 3).unbind()
    out = _attend(q, k, v, scale, real[:, None, None])
    return out.transpose(1, 2).flatten(0, 1).index_select(0, places)


def _spans(segments: torch.Tensor) -> list[tuple[int, int, int]]:
    """(row, begin, end) of every segment of [B, T]."""
    found = []
    for row, each in enumerate(segments):
        numbers, lengths = (x.tolist() for x in torch.unique_consecutive(each, return_counts=True))
        ends = itertools.accumulate(lengths)
        found += [(row, end - n, end) for number, n, end in zip(numbers, lengths, ends, strict=True) if number]
    return found


def _attention(
    attn: Any, hidden: torch.Tensor, rotary: Any, seen: list[tuple[int, int, int]] | torch.Tensor
) -> torch.Tensor:
    """Gated attention, hidden [B, T, H] -> the same: each of the spans `seen` by itself, or by a mask [B, 1, T, T]."""
    split = (*hidden.shape[:2], -1, attn.head_dim)
    q, gate = attn.q_proj(hidden).view(*split[:3], 2 * attn.head_dim).chunk(2, dim=-1)
    k, v = attn.k_norm(attn.k_proj(hidden).view(split)), attn.v_proj(hidden).view(split)
    q, k = qwen.apply_rotary_pos_emb(attn.q_norm(q), k, *rotary, unsqueeze_dim=2)
    if isinstance(seen, torch.Tensor):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = _attend(q, k, v, attn.scaling, seen).transpose(1, 2)
        return attn.o_proj((out * gate.sigmoid()).flatten(2))
    out = torch.zeros(q.shape, dtype=v.dtype, device=q.device)
    for row, begin, end in seen:
        queries, keys, values = (x[row : row + 1, begin:end].transpose(1, 2) for x in (q, k, v))
        found = _attend(queries, keys, values, attn.scaling, causal=True)
        out[row, begin:end] = found.to(v.dtype).transpose(1, 2)[0]
    return attn.o_proj((out * gate.sigmoid()).flatten(2))


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """[B, heads, T, width] -> the same. On a processor in float32: in bfloat16 it takes up to five times as long."""
    dtype = torch.float32 if on_processor(q) else v.dtype
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(dtype) for x in (q, k, v))
        if mask is not None:
            # A card's kernel for masks knows no groups of heads.
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=mask is None)


def _gated_delta_net(net: Any, hidden: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """A GDN layer over packed rows: hidden [B, T, H] is zero at padding, begins [B, T] is true where segments begin."""
    batch, length, _ = hidden.shape
    mixed = net.in_proj_qkv(hidden).float()
    taps = net.conv1d.weight.squeeze(1)
    padded = F.pad(mixed, (0, 0, taps.shape[1] - 1, 0))
    # Four products: PyTorch's grouped convolution is no faster on processors, and slow to go back through.
    mixed = F.silu(functools.reduce(torch.add, (padded[:, i : i + length] * tap for i, tap in enumerate(taps.T))))
    q, k, v = mixed.split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
    q, k = (x.reshape(batch, length, -1, net.head_k_dim) for x in (q, k))
    v = v.reshape(batch, length, -1, net.head_v_dim)
    beta = net.in_proj_b(hidden).float().sigmoid()
    decay = -net.A_log.float().exp() * F.softplus(net.in_proj_a(hidden).float() + net.dt_bias)
    decay = decay.masked_fill(begins[..., None], _FORGET)
    with torch.autocast(hidden.device.type, enabled=False):
        # A quarter of the steps one after the other, for more arithmetic.
        chunk = CHUNK if on_processor(hidden) else 4 * CHUNK
        out = gated_delta_rule(q.float(), k.float(), v.float(), decay, beta, chunk)
    out = net.norm(out.to(v.dtype).reshape(-1, net.head_v_dim), net.in_proj_z(hidden).reshape(-1, net.head_v_dim))
    return net.out_proj(out.reshape(batch, length, -1))


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, chunk: int = CHUNK
) -> torch.Tensor:
    """q, k, v [B, T, heads, width], decay (in log space) and beta [B, T, heads] -> [B, T, heads, width], fp32.

    As transformers' `torch_chunk_gated_delta_rule`; the triangular systems are inverted by products (`_inverse`), which
    a backward pass likes better than a solver.
    """
    batch, length, heads, width = q.shape
    pad = -length % chunk
    q, k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, pad)).reshape(batch * heads, -1, chunk, width) for x in (q, k, v))
    beta, decay = (F.pad(x.transpose(1, 2), (0, pad)).reshape(batch * heads, -1, chunk) for x in (beta, decay))
    q = F.normalize(q, dim=-1, eps=1e-6) * width**-0.5
    k = F.normalize(k, dim=-1, eps=1e-6)
    total = decay.cumsum(-1)
    upper = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    pairs = (total[..., :, None] - total[..., None, :]).masked_fill(upper, -torch.inf).exp()
    k_beta, v_beta = k * beta[..., None], v * beta[..., None]
    inverse = _inverse(-((k_beta @ k.mT) * pairs).tril(-1))
    news = inverse @ v_beta
    k_old = inverse @ (k_beta * total.exp()[..., None])
    inside = (q @ k.mT) * pairs
    q_old = q * total.exp()[..., None]
    k_end = (k * (total[..., -1:] - total).exp()[..., None]).mT
    keep = total[..., -1].exp()[..., None, None]
    state = q.new_zeros(batch * heads, width, v.shape[-1])
    outs = []
    parts = (x.unbind(1) for x in (news, k_old, inside, q_old, k_end, keep))
    for new, old, attention, query, key, kept in zip(*parts, strict=True):
        written = torch.baddbmm(new, old, state, alpha=-1)
        outs.append(torch.baddbmm(attention @ written, query, state))
        state = torch.baddbmm(state * kept, key, written)
    out = torch.stack(outs, 1).reshape(batch, heads, -1, v.shape[-1])
    return out[:, :, :length].transpose(1, 2)


def _inverse(below: torch.Tensor) -> torch.Tensor:
    """(1 - below)^-1 of strictly lower triangular matrices [..., n, n], n a power of two.

    Small ones are sums of powers, by squaring. In large ones these powers pass 10^8 and cancel where keys are alike, as
    those of a picture's plain parts are: so halves are inverted, and joined by substitution.
    """
    size = below.shape[-1]
    if size <= _SQUARED:
        inverse = below + torch.eye(size, device=below.device)
        for _ in range((size - 1).bit_length() - 1):
            below = below @ below
            inverse = inverse + inverse @ below
        return inverse
    half = size // 2
    first, last = _inverse(torch.stack([below[..., :half, :half], below[..., half:, half:]])).unbind()
    corner = last @ below[..., half:, :half] @ first
    return torch.cat([F.pad(first, (0, half)), torch.cat([corner, last], dim=-1)], dim=-2)
