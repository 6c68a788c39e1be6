"""The layer of multi-token prediction (MTP): one more decoder layer, which drafts tokens.

At place t it takes the embedding of token t and the decoder's hidden state of place t - 1, after the final norm, and
predicts token t + 1. To draft more tokens it takes its own output for the state. (vLLM's qwen3_5_mtp.py and llama.cpp's
qwen35.cpp compute the same; their places are counted from the hidden state.)

Its keys and values at a place come from that place's inputs alone, so prompts need no more of it than those.
"""

from __future__ import annotations

import torch
from torch import nn

from qwen35mm.config import TextConfig
from qwen35mm.model.batch import Batch
from qwen35mm.model.decoder_layer import DecoderLayer
from qwen35mm.model.layers import Linear, RMSNorm, Unnormed
from qwen35mm.model.weight_formats import ROUNDED_FORMATS, Factory, Weight, new_weight
from qwen35mm_kernels.cpu.native.library import find_library

# Rows of the output head that drafts are chosen from. The whole head is a third of a small model.
MOST_DRAFT_IDS = 1 << 15
_ROWS_AT_ONCE = 2048

Rope = tuple[torch.Tensor, torch.Tensor]


def num_draft_ids(vocab_size: int) -> int | None:
    """How many tokens drafts are chosen from; None for all."""
    return MOST_DRAFT_IDS if vocab_size > MOST_DRAFT_IDS else None


def draft_head_format(integers: str | None, *, on_cpu: bool) -> str | None:
    """The integers of the output head's rows for drafts, or None for floats.

    A processor's kernels read eight bits in half the time, and a draft needs no exact logits.

    Args:
        integers: the model's.
    """
    return "int8" if integers in ROUNDED_FORMATS or (on_cpu and find_library() is not None) else None


class MultiTokenPrediction(nn.Module):
    """Parameters: pre_fc_norm_embedding, pre_fc_norm_hidden, fc [hidden, embedding | state], layer, norm.

    Attributes:
        layer: a full-attention layer; its index is the number of decoder layers.
        head: the output head's rows that drafts are chosen from; None takes the whole head.
        draft_ids: [rows] int64, the token of each of these rows.
    """

    head: Weight | None
    draft_ids: torch.Tensor | None

    def __init__(self, config: TextConfig, factory: Factory) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.device = factory.device
        self.pre_fc_norm_embedding = RMSNorm(width, eps, factory)
        self.pre_fc_norm_hidden = RMSNorm(width, eps, factory)
        self.fc = Linear(2 * width, width, factory)
        self.layer = DecoderLayer(config, config.num_layers, factory)
        self.norm = RMSNorm(width, eps, factory)
        self.head = None
        self.register_buffer("draft_ids", None)

    def cut_head(self, head: Weight, token_ids: torch.Tensor, integers: str | None) -> None:
        """Copies the output head's rows of the tokens that drafts are chosen from.

        Args:
            token_ids: [rows] int64.
            integers: the model's.
        """
        on_cpu = head.device.type == "cpu"
        format = draft_head_format(integers, on_cpu=on_cpu)
        # Logits in float32, of which torch finds the largest in less than half the time.
        dtype = torch.float32 if on_cpu and format is not None else head.dtype
        self.head = new_weight(len(token_ids), head.in_features, Factory(dtype, head.device, format))
        self.draft_ids = token_ids.to(head.device)
        for start in range(0, len(token_ids), _ROWS_AT_ONCE):
            self.head.fill(start, head.rows(self.draft_ids[start : start + _ROWS_AT_ONCE]))

    def write(self, hidden: torch.Tensor, rope: Rope, batch: Batch) -> None:
        """Writes the keys and values of a batch's tokens; arguments as for `forward`."""
        x = self._joined(batch.embeds, hidden)
        self.layer.attention.write(self.layer.input_layernorm(x), rope, batch)

    def forward(self, hidden: torch.Tensor, rope: Rope, batch: Batch, last: torch.Tensor | None) -> torch.Tensor:
        """Writes the keys and values of new tokens of several sequences, and computes the last one of each.

        Args:
            hidden: [N, hidden], the decoder's states of the place before each token.
            rope: cosines and sines of the tokens' positions.
            batch: as a decode step's, with N tokens, and with a block table and a length for each sequence.
            last: [S] int64, the row of each sequence's last token; None if every row is one.

        Returns:
            [S, hidden], after the layer's own final norm.
        """
        x = self._joined(batch.embeds, hidden)
        q, gate = self.layer.attention.write(self.layer.input_layernorm(x), rope, batch)
        if last is not None:
            x, q, gate = x[last], q[last], gate[last]
        rows = Unnormed(self.layer.post_attention_layernorm, x, self.layer.attention.attend(q, gate, batch), True)
        added = self.layer.mlp(rows)
        return self.norm.add(rows.x, added)

    def _joined(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        width = embeds.shape[1]
        # Not `torch.cat`, which a recorded step doesn't know.
        joined = embeds.new_empty(len(embeds), 2 * width)
        joined[:, :width] = self.pre_fc_norm_embedding(embeds)
        joined[:, width:] = self.pre_fc_norm_hidden(hidden)
        return self.fc(joined)
