"""Trained gates: how much each token's keys and values will be needed, read from the inputs of an attention layer.

After Fast KVzip (arXiv:2601.17668): in each KV head a token's key stands against a few learned ones, the sinks, and the
score is the share that it gets of its own query's attention. Here all heads of a layer share one low-rank projection,
so that a gate has about a thousandth of its layer's parameters. Its scores are added to those of the keys, which is
better than either alone (docs/decisions.md). `qwen35mm gates` makes the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from qwen35mm.cache.disk import is_finite
from qwen35mm.cache.kv_types import AUTO
from qwen35mm.checkpoints.shards import find_shards
from qwen35mm.checkpoints.weights_digest import weights_digest
from qwen35mm.config import TextConfig
from qwen35mm.errors import CheckpointError
from qwen35mm.outside_json import load_json

logger = logging.getLogger(__name__)

# The name of a checkpoint's own gates, beside its weights.
GATES_FILE = "kv_gates.safetensors"
NONE = "none"
# Sizes of a key and its query, and the number of sinks of a head.
DIM, NUM_SINKS = 8, 8
_FORMAT = "qwen35mm-kv-gates-1"
_MAX_BYTES = 1 << 30
_MAKE = "`qwen35mm gates MODEL --out FILE`"

# The tensors of a layer's gate, by name; see `gate_scores`.
Gate = Mapping[str, torch.Tensor]


def gate_shapes(config: TextConfig, rank: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors."""
    heads, queries = config.num_key_value_heads, config.num_attention_heads
    return {
        "down": (rank, config.hidden_size),
        "query": (queries * DIM, rank),
        "query_bias": (queries * DIM,),
        "key": (heads * DIM, rank),
        "key_norm": (DIM,),
        "sinks": (heads, NUM_SINKS, DIM),
        "bias": (heads, queries // heads),
    }


def gate_scores(gate: Gate, x: torch.Tensor) -> torch.Tensor:
    """The scores of tokens in each KV head, between 0 and 1.

    Args:
        gate: float32.
        x: [N, hidden], the inputs of the attention layer, in any dtype.

    Returns:
        [N, heads] float32, the mean over the head's queries.
    """
    sinks, bias = gate["sinks"], gate["bias"]
    low = x.float() @ gate["down"].T
    query = _normed(torch.addmm(gate["query_bias"], low, gate["query"].T).view(len(x), *bias.shape, DIM))
    key = _normed((low @ gate["key"].T).view(len(x), len(bias), DIM)) * gate["key_norm"]
    own = (query * key[:, :, None]).sum(-1) * DIM**-0.5 + bias
    others = torch.einsum("nhgd,hsd->nhgs", query, sinks) * DIM**-0.5
    return torch.sigmoid(own - others.logsumexp(-1)).mean(-1)


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True, eq=False)
class KVGates:
    """The gates of a model's attention layers.

    Attributes:
        digest: hex SHA-256 of the file.
        layers: by layer, float32.
    """

    digest: str
    layers: Mapping[int, Gate]

    @classmethod
    def read(cls, path: Path, config: TextConfig, model: str) -> KVGates:
        """Reads a file of gates.

        Args:
            model: the digest of the weights that they must belong to.

        Raises:
            CheckpointError: it is missing, damaged, foreign or another model's.
        """
        data = _read(path)
        try:
            start = 8 + int.from_bytes(data[:8], "little")
            about: Any = load_json(load_json(data[8:start])["__metadata__"][_FORMAT])
            stored = safetensors.torch.load(data)
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError):
            advice = f"Expected is a file that {_MAKE} has written"
            raise _bad(path, "it is no file of gates, or was cut off", advice) from None
        if not isinstance(about, dict):
            about = {}
        if about.get("sha256") != hashlib.sha256(data[start:]).hexdigest():
            raise _bad(path, "it is damaged: its numbers don't have the digest in its header", "Get or make it again")
        if about.get("model") != model:
            what = f"it was trained on another model ({about.get('model')!s:.12}, this one is {model:.12})"
            raise OtherModelError(
                str(_bad(path, what, f"Make one for this model with {_MAKE}, or leave it out with --kv-gates none"))
            )
        layers = _checked(path, stored, config)
        logger.info("Gates of %s choose which keys and values are kept.", path.name)
        return cls(hashlib.sha256(data).hexdigest(), layers)

    def on(self, devices: Sequence[torch.device]) -> KVGates:
        """The same, beside their layers."""
        # The layer of multi-token prediction lies beside the last one.
        places = {layer: devices[min(layer, len(devices) - 1)] for layer in self.layers}
        return replace(
            self,
            layers={
                layer: {name: tensor.to(places[layer]) for name, tensor in gate.items()}
                for layer, gate in self.layers.items()
            },
        )


class OtherModelError(CheckpointError):
    """The gates belong to other weights."""


class GatedScores:
    """Scores a prefill's tokens as they pass the attention layers."""

    def __init__(self, gates: KVGates) -> None:
        self._gates = gates
        self._found: dict[int, list[torch.Tensor]] = {}

    def __call__(self, layer_idx: int, x: torch.Tensor, q: torch.Tensor) -> None:
        """See `Batch.watch`."""
        self._found.setdefault(layer_idx, []).append(gate_scores(self._gates.layers[layer_idx], x))

    def take(self) -> dict[int, torch.Tensor]:
        """By layer, the scores [n, heads] of all tokens since the last call."""
        found, self._found = self._found, {}
        return {layer_idx: torch.cat(parts) for layer_idx, parts in found.items()}


def find_gates(folder: Path, chosen: str | Path, config: TextConfig, memo: Path | None) -> KVGates | None:
    """A checkpoint's gates.

    Args:
        chosen: a file, or `AUTO` for the one beside the weights if there is one, or `NONE`.
        memo: see `weights_digest`.

    Raises:
        CheckpointError: the file can't be used.
    """
    if chosen == NONE:
        return None
    path = find_shards(folder)[0].parent / GATES_FILE if chosen == AUTO else Path(chosen).expanduser()
    if chosen == AUTO and not path.exists():
        return None
    try:
        return KVGates.read(path, config, weights_digest(folder, memo))
    except OtherModelError as error:
        # Several GGUF files may lie in one folder.
        if chosen != AUTO:
            raise
        logger.warning("%s", error)
        return None


def gates_file(layers: Mapping[int, Gate], model: str) -> bytes:
    """A file of gates, whose numbers are rounded to bfloat16.

    Args:
        model: the digest of the weights that they belong to.
    """
    tensors = {
        f"layers.{layer}.{name}": tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for layer, gate in layers.items()
        for name, tensor in gate.items()
    }
    plain = safetensors.torch.save(tensors)
    numbers = plain[8 + int.from_bytes(plain[:8], "little") :]
    # One text: safetensors writes several in any order.
    about = json.dumps({"model": model, "sha256": hashlib.sha256(numbers).hexdigest()})
    return safetensors.torch.save(tensors, {_FORMAT: about})


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise _bad(path, "it is larger than 1 GiB", f"Expected is a file that {_MAKE} has written")
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _bad(path, f"it can't be read ({reason})", f"Make it with {_MAKE}") from None


def _checked(path: Path, stored: Mapping[str, torch.Tensor], config: TextConfig) -> dict[int, Gate]:
    """The tensors by layer, in float32. Raises CheckpointError."""
    first = stored.get(f"layers.{config.attention_layers[0]}.down")
    rank = len(first) if first is not None and first.dim() == 2 else 0
    shapes, left, found = gate_shapes(config, rank), dict(stored), {}
    for layer in config.attention_layers:
        found[layer] = {}
        for name, shape in shapes.items():
            tensor = left.pop(key := f"layers.{layer}.{name}", None)
            if tensor is None:
                raise _bad(path, f"it has no {key}", f"Make it again with {_MAKE}")
            if tensor.shape != shape or tensor.dtype not in (torch.bfloat16, torch.float32):
                what = f"{key} is {tensor.dtype} {list(tensor.shape)}, expected are floats of {list(shape)}"
                raise _bad(path, what, f"Make it again with {_MAKE}")
            if not is_finite(tensor):
                raise _bad(path, f"{key} has numbers that are not finite", f"Make it again with {_MAKE}")
            found[layer][name] = tensor.float()
    return found


def _bad(path: Path, what: str, advice: str) -> CheckpointError:
    return CheckpointError(f"Gates {path.name}: {what}. {advice}.")
