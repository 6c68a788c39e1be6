"""The model: embeddings, hybrid decoder layers, final norm, output head, and the vision tower beside them.

Hidden states are flat, [num_tokens, hidden], without padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from qwen35mm.config import ModelConfig
from qwen35mm.model.adapters import Routes
from qwen35mm.model.batch import Batch
from qwen35mm.model.decoder_layer import DecoderLayer
from qwen35mm.model.devices import DeviceMap
from qwen35mm.model.layers import Embedding, Linear, RMSNorm
from qwen35mm.model.mtp import MultiTokenPrediction
from qwen35mm.model.rope import TextRope
from qwen35mm.model.vision import VisionTower
from qwen35mm.model.weight_formats import Factory, Weight


class Qwen35Model(nn.Module):
    """A Qwen3.5 checkpoint, dense or MoE. Its parameters are uninitialised until `weights.load_model` fills them.

    With tied embeddings `lm_head` is None and the embedding table is the output head.

    Args:
        device: one device for the whole model, or one for each part.
        integers: `int8` or `int4` for the layers' matrices. Embeddings and the output head take eight bits in both;
            norms, gates and the vision tower stay floats. Or `AS_STORED` or `FP8`, which `load_model` lays out.
        is_mapped: see `Factory`.

    Attributes:
        mtp: the layer that drafts tokens; None unless the config runs it.
        visual: None for a text-only model.
        integers: the argument.
        routes: which rows have which adapter, of those that aren't merged into the weights.
        layer_devices: the device of each layer and of its states, keys and values.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | DeviceMap,
        tie_word_embeddings: bool | None = None,
        integers: str | None = None,
        is_mapped: bool = False,
    ) -> None:
        super().__init__()
        text = config.text
        places = device if isinstance(device, DeviceMap) else DeviceMap.on(device, text.num_layers)
        tied = config.tie_word_embeddings if tie_word_embeddings is None else tie_word_embeddings

        def on(place: torch.device) -> Factory:
            return Factory(dtype, place, integers, is_mapped)

        self.config, self.integers = config, integers
        self.routes = Routes()
        self.embedding = Embedding(text.vocab_size, text.hidden_size, on(places.embedding).head(), is_head=tied)
        self.layers = nn.ModuleList(DecoderLayer(text, index, on(place)) for index, place in enumerate(places.layers))
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps, on(places.norm))
        self.mtp = MultiTokenPrediction(text, on(places.layers[-1])) if text.runs_mtp else None
        self.lm_head = None if tied else Linear(text.hidden_size, text.vocab_size, on(places.lm_head).head())
        self.visual = None if config.tower is None else VisionTower(config.vision, on(places.visual).exact())
        self.rope = TextRope(text.rope, places.embedding)
        self.layer_devices = places.layers
        self.eval()

    @property
    def num_parts(self) -> int:
        """Layers that a prompt goes through: the decoder's, and one of multi-token prediction."""
        return len(self.layers) + (self.mtp is not None)

    @property
    def tower(self) -> VisionTower:
        """The vision tower of a multimodal model."""
        assert self.visual is not None, "this model reads text alone"
        return self.visual

    @property
    def device(self) -> torch.device:
        """The device that takes tokens and positions."""
        return self.embedding.weight.device

    @property
    def head_device(self) -> torch.device:
        """The device that gives logits."""
        return self.head.device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Every device that holds a part of the model; the input's comes first."""
        return tuple(dict.fromkeys((self.device, *self.layer_devices, *(x.device for x in self.parameters()))))

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def embed_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [T] int64 -> [T, hidden] in the model's dtype, a new tensor that may be overwritten."""
        return self.embedding(token_ids)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Runs a batch's tokens; writes their keys, values and states to its pools.

        A decode step's row depends on the other rows only in matrix products; a fixed number of rows removes that.

        Returns:
            [N, hidden], after the final norm; unused rows hold arbitrary values.
        """
        *_, hidden = self.by_layers(batch)
        assert hidden is not None
        return hidden

    def by_layers(self, batch: Batch) -> Iterator[torch.Tensor | None]:
        """`forward` in parts, for callers in inference mode. Other batches may run between two parts.

        Yields:
            None between two layers, and the hidden states in the end.
        """
        assert batch.positions.shape == (3, len(batch.embeds))
        rope = self.rope(batch.positions)
        x, delta = batch.embeds, None
        for index, (device, layer) in enumerate(zip(self.layer_devices, self.layers, strict=True)):
            if index:
                yield None
            if x.device != device:
                x, rope, batch = x.to(device), (rope[0].to(device), rope[1].to(device)), batch.on(device)
                delta = None if delta is None else delta.to(device)
            with self.routes.using(batch.adapters):
                x, delta = layer(x, delta, rope, batch)
        assert delta is not None
        last = self.norm.weight.device
        yield self.norm.add(x.to(last), delta.to(last))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden], only the rows that need logits -> [N, vocab], in the head's dtype."""
        return self.head.product(hidden.to(self.head.device))

    @torch.inference_mode()
    def write_mtp(self, batch: Batch, hidden: torch.Tensor) -> None:
        """Writes the MTP layer's keys and values of a batch's tokens.

        Args:
            hidden: [N, hidden], the state of the place before each token, after the final norm.
        """
        assert self.mtp is not None, "this model runs no MTP layer"
        cos, sin = self.rope(batch.positions)
        device = self.mtp.device
        on_device = replace(batch, embeds=batch.embeds.to(device)).on(device)
        self.mtp.write(hidden.to(device), (cos.to(device), sin.to(device)), on_device)

    @torch.inference_mode()
    def drafts(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens by the MTP layer's output [N, hidden]: [N] int64, on the head's device."""
        assert self.mtp is not None, "this model runs no MTP layer"
        head, draft_ids = self.mtp.head, self.mtp.draft_ids
        if head is None or draft_ids is None:
            return self.logits(hidden).argmax(dim=-1)
        return draft_ids[head.product(hidden.to(head.device, head.dtype)).argmax(dim=-1)]

    @property
    def head(self) -> Weight:
        """The output head: `logits` are its products."""
        return self.embedding.weight if self.lm_head is None else self.lm_head.weight
