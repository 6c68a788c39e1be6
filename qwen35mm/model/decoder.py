"""The model: embeddings, hybrid decoder layers, final norm, output head, and the vision tower beside them.

Hidden states are flat, [num_tokens, hidden], without padding. There are two paths through the layers: `prefill`
takes the next piece of one sequence, `decode` one token for each of B sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from qwen35mm.config import ModelConfig, TextConfig
from qwen35mm.model.attention import GatedAttention
from qwen35mm.model.cache_protocol import DecodeInputs, Pools, PrefillPlaces, SequenceCache
from qwen35mm.model.dense import linear
from qwen35mm.model.device_map import DeviceMap
from qwen35mm.model.gated_delta_net import GatedDeltaNet
from qwen35mm.model.layers import Embedding, Factory, Linear, RMSNorm
from qwen35mm.model.mlp import MLP
from qwen35mm.model.moe import SparseMoE
from qwen35mm.model.rope import TextRope
from qwen35mm.model.rows import each_row, few_rows
from qwen35mm.model.vision import VisionTower


class DecoderLayer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); the mixer is `linear_attn` or `self_attn`."""

    def __init__(self, config: TextConfig, layer_idx: int, factory: Factory) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, factory)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, factory)
        self.linear_attn, self.self_attn = None, None
        if config.layer_types[layer_idx] == "linear_attention":
            self.linear_attn = GatedDeltaNet(config, layer_idx, factory)
        else:
            self.self_attn = GatedAttention(config, layer_idx, factory)
        if config.moe is not None:
            self.mlp = SparseMoE(config.hidden_size, config.moe, factory)
        else:
            assert config.intermediate_size is not None
            self.mlp = MLP(config.hidden_size, config.intermediate_size, factory)

    def prefill(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        cache: SequenceCache,
        places: PrefillPlaces | None = None,
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; `x` itself is overwritten."""
        normed = self.input_layernorm(x)
        if self.linear_attn is not None:
            mixed = self.linear_attn.prefill(normed, cache)
        else:
            assert self.self_attn is not None
            mixed = self.self_attn.prefill(normed, rope, cache, places)
        x += self.mlp(self.post_attention_layernorm.add(x, mixed))
        return x

    def decode(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        caches: Sequence[SequenceCache],
        num_rows: int | None = None,
    ) -> torch.Tensor:
        """[B, hidden] -> [B, hidden]; `x` itself is overwritten."""
        normed = few_rows(self.input_layernorm, x, num_rows=num_rows)
        if self.linear_attn is not None:
            x += self.linear_attn.decode(normed, caches, num_rows)
        else:
            assert self.self_attn is not None
            x += self.self_attn.decode(normed, rope, caches, num_rows)
        x += self.mlp(few_rows(self.post_attention_layernorm, x, num_rows=num_rows), num_rows)
        return x

    def decode_step(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        rope: tuple[torch.Tensor, torch.Tensor],
        inputs: DecodeInputs,
        pools: Pools,
    ) -> torch.Tensor:
        """`decode` on the device. What a layer adds to `x` is added where it is next normed.

        Args:
            x: [B, hidden], overwritten.
            delta: [B, hidden], what the layer before adds to x.

        Returns:
            [B, hidden], what this layer adds to x.
        """
        normed = self.input_layernorm(x) if delta is None else self.input_layernorm.add(x, delta)
        if self.linear_attn is not None:
            mixed = self.linear_attn.decode_step(normed, inputs.slots, pools.states)
        else:
            assert self.self_attn is not None
            mixed = self.self_attn.decode_step(normed, rope, inputs, pools.kv)
        return self.mlp(self.post_attention_layernorm.add(x, mixed))


class Qwen35Model(nn.Module):
    """A Qwen3.5 checkpoint, dense or MoE. Made uninitialised; `weights.load_model` makes it and fills it.

    With tied embeddings `lm_head` is None and the embedding table is the output head.

    Args:
        device: where all of it goes, or each part.

    Attributes:
        layer_devices: of each layer, and of its states, keys and values.
        pages_prefill: the devices whose attention layers find keys and values through a block table in prefill.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | DeviceMap,
        tie_word_embeddings: bool | None = None,
    ) -> None:
        super().__init__()
        text = config.text
        places = device if isinstance(device, DeviceMap) else DeviceMap.on(device, text.num_layers)
        tied = config.tie_word_embeddings if tie_word_embeddings is None else tie_word_embeddings

        def on(place: torch.device) -> Factory:
            return Factory(dtype=dtype, device=place)

        self.config = config
        self.embedding = Embedding(text.vocab_size, text.hidden_size, on(places.embedding))
        self.layers = nn.ModuleList(DecoderLayer(text, index, on(place)) for index, place in enumerate(places.layers))
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps, on(places.norm))
        self.lm_head = None if tied else Linear(text.hidden_size, text.vocab_size, on(places.lm_head))
        self.visual = VisionTower(config.vision, on(places.visual))
        self.rope = TextRope(text.rope, places.embedding)
        self.layer_devices = places.layers
        # A CPU reads a sequence that lies in one run as it is; kernels follow a block table at no cost.
        self.pages_prefill = frozenset(place for place in places.layers if place.type != "cpu")
        self.eval()

    @property
    def device(self) -> torch.device:
        """Where tokens and positions come in."""
        return self.embedding.weight.device

    @property
    def head_device(self) -> torch.device:
        """Where logits come out."""
        return self._head.device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Every device that holds a part of it, the first one first."""
        return tuple(dict.fromkeys((self.device, *self.layer_devices, *(x.device for x in self.parameters()))))

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def embed_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [T] int64 -> [T, hidden] in the model's dtype, a tensor of its own that may be written to."""
        return self.embedding(token_ids)

    @torch.inference_mode()
    def prefill(self, embeds: torch.Tensor, positions: torch.Tensor, cache: SequenceCache) -> torch.Tensor:
        """Runs the next piece of one sequence and appends it to its cache; several calls make a chunked prefill.

        Args:
            embeds: [T, hidden], tokens' rows with vision embeddings in place; not changed.
            positions: [3, T] int64, the M-RoPE positions of these tokens.
            cache: the sequence's; moved on by T tokens. After an exception it must not be used again, unless
                the exception came from `cache.prepare` (no room), which changes nothing.

        Returns:
            [T, hidden], after the final norm.
        """
        num_tokens = embeds.shape[0]
        _check_positions(positions, num_tokens)
        cache.prepare(num_tokens)
        rope = self.rope(positions)
        places = cache.places(num_tokens) if self.pages_prefill else None
        x = embeds.clone()
        for device, layers in self._stages():
            x, rope = x.to(device), _moved(rope, device)
            there = places.to(device) if places is not None and device in self.pages_prefill else None
            for layer in layers:
                x = layer.prefill(x, rope, cache, there)
        cache.advance(num_tokens)
        return self.norm(x.to(self.norm.weight.device))

    @torch.inference_mode()
    def decode(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[SequenceCache],
        *,
        num_rows: int | None = None,
    ) -> torch.Tensor:
        """Runs one token for each of B sequences, at their own lengths and positions.

        Args:
            token_ids: [B] int64.
            positions: [3, B] int64; after a prompt, length + rope_delta in all three rows.
            caches: one per token, all of one pool, all different; each is moved on by one token. Sorted by
                slot they need the fewest kernel calls.
            num_rows: at least B, the same for all steps of a sequence. With it, a sequence's row and its states
                are the same bits alone and in any company, in any row and slot: every product has this number of
                rows or one, and all else is done for each sequence by itself. Rows beyond B take part in the
                dense products only, as zeros. Without it, the fewest kernel calls.

        Returns:
            [B, hidden], after the final norm.

        Raises:
            ValueError: arguments that don't fit together.
            Whatever `cache.prepare` raises (no room): nothing is computed and no sequence has changed. An engine
                that wants to know which sequence has no room calls `prepare(1)` of each itself before.
        """
        _check_positions(positions, len(caches))
        _check_batch(token_ids, caches, num_rows)
        for cache in caches:
            cache.prepare(1)
        cos, sin = each_row(lambda rows: self.rope(rows.t()), positions.t(), num_rows=num_rows)
        x, rope = self.embedding(token_ids), (cos, sin)
        for device, layers in self._stages():
            x, rope = x.to(device), _moved(rope, device)
            for layer in layers:
                x = layer.decode(x, rope, caches, num_rows)
        for cache in caches:
            cache.advance(1)
        return few_rows(self.norm, x.to(self.norm.weight.device), num_rows=num_rows)

    @torch.inference_mode()
    def decode_step(self, inputs: DecodeInputs, pools: Pools) -> torch.Tensor:
        """`decode` where everything is on the device, so that a CUDA graph can hold it: no cache is asked or moved on.

        Rows depend on their company in the products of matrices alone: a fixed B makes them free of it.

        Returns:
            [B, hidden], after the final norm; rows that no sequence uses hold anything.
        """
        rope = self.rope(inputs.positions.expand(3, -1))
        x, delta = self.embedding(inputs.token_ids), None
        for device, layers in self._stages():
            x, rope, inputs = x.to(device), _moved(rope, device), inputs.to(device)
            delta = None if delta is None else delta.to(device)
            for layer in layers:
                delta = layer.decode_step(x, delta, rope, inputs, pools)
        assert delta is not None
        last = self.norm.weight.device
        return self.norm.add(x.to(last), delta.to(last))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, *, num_rows: int | None = None) -> torch.Tensor:
        """hidden: [N, hidden], only the rows that are asked for -> [N, vocab] float32.

        num_rows: as in `decode`, at least N.
        """
        head = self._head
        return linear(hidden.to(head.device), head, num_rows=num_rows).float()

    @property
    def _head(self) -> torch.Tensor:
        return self.embedding.weight if self.lm_head is None else self.lm_head.weight

    def _stages(self) -> Iterator[tuple[torch.device, list[DecoderLayer]]]:
        """The layers in order, in runs that lie on one device."""
        placed = zip(self.layer_devices, self.layers, strict=True)
        for device, run in itertools.groupby(placed, key=lambda pair: pair[0]):
            layers = [layer for _, layer in run]
            assert all(isinstance(layer, DecoderLayer) for layer in layers)
            yield device, layers  # pyright: ignore[reportReturnType]


def _moved(rope: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rope
    return cos.to(device), sin.to(device)


def _check_positions(positions: torch.Tensor, num_tokens: int) -> None:
    if positions.shape != (3, num_tokens):
        raise ValueError(f"positions must be [3, {num_tokens}]; got {list(positions.shape)}.")


def _check_batch(token_ids: torch.Tensor, caches: Sequence[SequenceCache], num_rows: int | None) -> None:
    if not caches or token_ids.shape != (len(caches),):
        raise ValueError(
            f"decode takes one token for each of one or more caches; got token_ids {list(token_ids.shape)} "
            f"and {len(caches)} caches."
        )
    if len({cache.slot for cache in caches}) < len(caches):
        raise ValueError("decode takes each sequence once; got the same cache twice.")
    if num_rows is not None and len(caches) > num_rows:
        raise ValueError(
            f"num_rows must be at least the number of sequences; got {num_rows} for {len(caches)}. "
            "Pass the most sequences that ever decode together."
        )
