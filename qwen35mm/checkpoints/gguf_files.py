"""GGUF files: what their headers say, and their tensors as those of the family's own checkpoints.

The package `gguf` (the extra of that name) dequantises. What llama.cpp's converter changes on the way to GGUF
(conversion/qwen.py and qwen3vl.py of its sources) is changed back: norms have 1 added, A_log is -exp of itself, the
value heads of a Gated DeltaNet layer stand in the order in which key heads are repeated, and not beside their key head.
"""

from __future__ import annotations

import contextlib
import functools
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from qwen35mm.checkpoints.safetensors_files import StoredTensor
from qwen35mm.checkpoints.sources import Source, damaged
from qwen35mm.checkpoints.tensor_names import EMBEDDING, LM_HEAD, TEXT_PREFIX, VISION_PREFIX
from qwen35mm.errors import CheckpointError, MissingExtraError

TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M", "MXFP4", "NVFP4"),
)
# Of float32 that is made at one time.
_VALUES_AT_ONCE = 1 << 22
_LAYER = re.compile(r"(?P<tower>v\.)?blk\.(?P<index>\d+)\.(?P<name>.+)")

_TEXT = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": f"{TEXT_PREFIX}norm.weight",
    "output.weight": LM_HEAD,
    "v.patch_embd.weight": f"{VISION_PREFIX}patch_embed.proj.weight",
    "v.patch_embd.bias": f"{VISION_PREFIX}patch_embed.proj.bias",
    "v.position_embd.weight": f"{VISION_PREFIX}pos_embed.weight",
    **{f"mm.{at}.{end}": f"{VISION_PREFIX}merger.linear_fc{number}.{end}"
       for at, number in ((0, 1), (2, 2)) for end in ("weight", "bias")},
    **{f"v.post_ln.{end}": f"{VISION_PREFIX}merger.norm.{end}" for end in ("weight", "bias")},
}  # fmt: skip
_LAYERS = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    **{f"attn_{ours}.weight": f"self_attn.{theirs}.weight" for ours, theirs in (
        ("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj"), ("q_norm", "q_norm"),
        ("k_norm", "k_norm"))},
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    **{f"ffn_{part}.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp.weight": f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_exps.weight": f"mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")},
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
}  # fmt: skip
_TOWER = {
    f"{ours}.{end}": f"{theirs}.{end}"
    for ours, theirs in (
        ("attn_qkv", "attn.qkv"), ("attn_out", "attn.proj"), ("ffn_up", "mlp.linear_fc1"),
        ("ffn_down", "mlp.linear_fc2"), ("ln1", "norm1"), ("ln2", "norm2"))
    for end in ("weight", "bias")
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as a header describes it, in torch's order of dimensions."""

    stored: StoredTensor
    kind: Any

    def data(self) -> np.ndarray:
        """[..., bytes of a row] uint8, in the file."""
        shape = (*self.stored.shape[:-1], -1)
        mapped = np.memmap(self.stored.file, np.uint8, "r", self.stored.start, (self.stored.num_bytes,))
        return mapped.reshape(shape)


class GgufFile:
    """One file's header. We read it ourselves: the package takes half a minute for a vocabulary of 248,000 tokens.

    Raises:
        CheckpointError: it is damaged, or no GGUF file.
        MissingExtraError: the package that knows the types isn't installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise MissingExtraError("A GGUF file", "gguf") from error
        self.path = path
        with _in_words(path):
            header = _Header(np.memmap(path, np.uint8, "r"))
            if header.take(4) != b"GGUF" or header.number("I") not in (2, 3):
                raise ValueError("another magic")
            num_tensors, num_values = header.number("Q"), header.number("Q")
            self._values = {header.text(): header.value() for _ in range(num_values)}
            entries = [_entry(header) for _ in range(num_tensors)]
            alignment = int(self.value("general.alignment", 32))
            start = -(-header.at // alignment) * alignment
            self.tensors: dict[str, GgufTensor] = {}
            for name, shape, number, offset in entries:
                kind = gguf.GGMLQuantizationType(number)
                block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
                size = prod(shape) // block * num_bytes
                if shape[-1] % block or start + offset + size > path.stat().st_size:
                    raise ValueError(name)
                self.tensors[name] = GgufTensor(StoredTensor(name, path, kind.name, shape, start + offset, size), kind)
        # Of a model in several files only the first says it.
        self.architecture = str(self.value("general.architecture", ""))

    def value(self, key: str, default: Any = None) -> Any:
        """What a key holds; of a file without it the default, and CheckpointError where that is None."""
        found = self._values.get(key, default)
        if found is None:
            raise CheckpointError(f"{self.path.name} lacks {key}: it isn't complete. Download it again.")
        return found() if callable(found) else found

    def own(self, key: str, default: Any = None) -> Any:
        """The same of a key under the architecture's name."""
        return self.value(f"{self.architecture}.{key}", default)

    def has(self, key: str) -> bool:
        return key in self._values


class _Header:
    """Reads values one after the other; whatever doesn't fit raises ValueError."""

    _NUMBERS = MappingProxyType(
        {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    )
    _STRING, _ARRAY = 8, 9

    def __init__(self, data: np.ndarray) -> None:
        self._data = data.data
        self.at = 0

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self._data) - self.at:
            raise ValueError("the file ends")
        self.at += count
        return bytes(self._data[self.at - count : self.at])

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self) -> Any:
        """A number or a string, or of an array what reads it when it is wanted."""
        return self._of(self.number("I"))

    def _of(self, kind: int) -> Any:
        if kind == self._STRING:
            return self.text()
        if kind != self._ARRAY:
            return self.number(self._NUMBERS[kind])
        inner, count, start = self.number("I"), self.number("Q"), self.at
        if inner == self._STRING:
            for _ in range(count):
                (size,) = struct.unpack_from("<Q", self._data, self.at)
                self.at += 8 + size
            return functools.partial(self._texts, start, count)
        code = self._NUMBERS[inner]
        raw = self.take(count * struct.calcsize(f"<{code}"))
        return lambda: list(struct.unpack(f"<{count}{code}", raw))

    def _texts(self, at: int, count: int) -> list[str]:
        found = []
        for _ in range(count):
            (size,) = struct.unpack_from("<Q", self._data, at)
            found.append(bytes(self._data[at + 8 : at + 8 + size]).decode("utf-8", "replace"))
            at += 8 + size
        return found


def _entry(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dimensions = header.text(), header.number("I")
    if not 1 <= num_dimensions <= 4:
        raise ValueError(name)
    shape = tuple(header.number("Q") for _ in range(num_dimensions))[::-1]
    if not all(0 < size < 1 << 40 for size in shape):
        raise ValueError(name)
    return name, shape, header.number("I"), header.number("Q")


@dataclass(frozen=True)
class GgufSource(Source):
    """A tensor, or an expert's part of one, as the family's own checkpoints have it.

    Attributes:
        matrices: [rows, bytes] each, as the file has them, side by side in the last dimension but `width`.
        type: the gguf package's, in which all of them are stored.
    """

    matrices: tuple[np.ndarray, ...]
    type: Any
    row_order: np.ndarray | None = None
    column_order: np.ndarray | None = None
    change: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        return self.stored[""].dtype

    def rows(self, width: int, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        stored, *others = self.matrices
        if others:
            yield self._several().reshape(-1, width)
            return
        at_once = max(1, _VALUES_AT_ONCE // self.shape[-1])
        for start in range(0, len(stored), at_once):
            part = slice(start, start + at_once)
            found = self._numbers(stored[part if self.row_order is None else self.row_order[part]])
            yield (found if self.change is None else self.change(found)).reshape(-1, width)

    def _several(self) -> torch.Tensor:
        """Two frames of a patch: [out, channels, height, width] each -> [out, channels, 2, height, width]."""
        out, channels, _, *size = self.shape
        return torch.stack([self._numbers(each).view(out, channels, *size) for each in self.matrices], dim=2)

    def _numbers(self, stored: np.ndarray) -> torch.Tensor:
        from gguf.quants import dequantize

        # A copy: floats are still the file's own, which is read-only.
        found = torch.from_numpy(np.array(dequantize(stored, self.type), dtype=np.float32))
        if not bool(found.isfinite().all()):
            raise damaged(self.name, self.stored, "holds values that are no finite numbers")
        return found if self.column_order is None else found[:, self.column_order]


def gguf_sources(files: Sequence[GgufFile]) -> dict[str, Source]:
    """The tensors of a model's files, by the names of the family's own checkpoints.

    Raises:
        CheckpointError: a tensor is of a type that can't be read, or isn't one of the family's.
    """
    text = files[0]
    num_layers = int(text.own("block_count")) - int(text.own("nextn_predict_layers", 0))
    heads = ValueHeads.of(text)
    found: dict[str, Source] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if (kind := tensor.stored.dtype) not in TYPES:
                raise CheckpointError(
                    f"{name} in {file.path.name} is {kind}, which isn't read: {', '.join(TYPES)} are."
                )
            layer = _LAYER.fullmatch(name)
            if layer and not layer["tower"] and int(layer["index"]) >= num_layers:
                continue  # of multi-token prediction
            if name == "v.patch_embd.weight.1":
                continue  # goes with the first
            found |= {source.name: source for source in _sources(file, name, layer, tensor, heads)}
    return found


@dataclass(frozen=True)
class ValueHeads:
    """The value heads of a Gated DeltaNet layer: GGUF has the first of each key head, then the second of each, ..."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, file: GgufFile) -> ValueHeads:
        num_key_heads, num_value_heads = (int(file.own(f"ssm.{key}")) for key in ("group_count", "time_step_rank"))
        sizes = num_key_heads, num_value_heads, int(file.own("ssm.state_size")), int(file.own("ssm.inner_size"))
        if not all(size > 0 for size in sizes) or num_value_heads % num_key_heads or sizes[3] % num_value_heads:
            raise CheckpointError(f"{file.path.name}: its Gated DeltaNet heads can't be {sizes}. Download it again.")
        return cls(*sizes[:3], sizes[3] // num_value_heads)

    def order(self, width: int, before: int = 0) -> np.ndarray:
        """Where each row of the family's order is: heads of `width` rows, behind `before` rows that stay."""
        stored = np.arange(self.num_value_heads * width)
        repeated = stored.reshape(self.num_value_heads // self.num_key_heads, self.num_key_heads, width)
        return np.concatenate([np.arange(before), before + repeated.swapaxes(0, 1).ravel()])

    def row_order(self, name: str) -> np.ndarray | None:
        """Of a tensor by its family's name; None where rows stay."""
        last = name.rpartition("linear_attn.")[2]
        keys = 2 * self.num_key_heads * self.key_dim
        return {
            "in_proj_qkv.weight": lambda: self.order(self.value_dim, keys),
            "conv1d.weight": lambda: self.order(self.value_dim, keys),
            "in_proj_z.weight": lambda: self.order(self.value_dim),
            "in_proj_a.weight": lambda: self.order(1),
            "in_proj_b.weight": lambda: self.order(1),
        }.get(last, lambda: None)()


def _sources(
    file: GgufFile, name: str, layer: re.Match[str] | None, tensor: GgufTensor, heads: ValueHeads
) -> Iterator[GgufSource]:
    theirs = _name(name, layer)
    if theirs is None:
        raise CheckpointError(f"{file.path.name} holds {name}, which no Qwen3.5 model has. Use another file.")
    shape, data, kind = tensor.stored.shape, tensor.data(), tensor.kind
    parts: Mapping[str, StoredTensor] = {"": tensor.stored}
    if "{}" in theirs:
        for expert in range(shape[0]):
            yield GgufSource(theirs.format(expert), shape[1:], parts, (data[expert],), kind)
    elif name == "v.patch_embd.weight":
        frames = tuple(file.tensors[each].data().reshape(shape[0], -1) for each in (name, f"{name}.1"))
        yield GgufSource(theirs, (*shape[:2], 2, *shape[2:]), parts, frames, kind)
    elif theirs.endswith("conv1d.weight"):
        yield GgufSource(theirs, (shape[0], 1, shape[1]), parts, (data,), kind, heads.row_order(theirs))
    elif theirs.endswith("shared_expert_gate.weight"):
        yield GgufSource(theirs, (1, shape[-1]), parts, (data.reshape(1, -1),), kind)
    elif len(shape) == 1:
        columns = heads.order(1) if theirs.endswith((".A_log", ".dt_bias")) else None
        yield GgufSource(theirs, shape, parts, (data.reshape(1, -1),), kind, None, columns, _change(theirs))
    else:
        columns = heads.order(heads.value_dim) if theirs.endswith("linear_attn.out_proj.weight") else None
        yield GgufSource(theirs, shape, parts, (data,), kind, heads.row_order(theirs), columns)


def _name(name: str, layer: re.Match[str] | None) -> str | None:
    """The family's name of a tensor; {} stands for an expert."""
    if layer is None:
        return _TEXT.get(name)
    found = (_TOWER if layer["tower"] else _LAYERS).get(layer["name"])
    prefix = f"{VISION_PREFIX}blocks." if layer["tower"] else f"{TEXT_PREFIX}layers."
    return None if found is None else f"{prefix}{layer['index']}.{found}"


def _change(name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What undoes the converter's arithmetic."""
    if name.endswith(".A_log"):
        return lambda x: torch.log(-x)
    is_centred = name.startswith(TEXT_PREFIX) and name.endswith("norm.weight") and "linear_attn.norm" not in name
    return (lambda x: x - 1) if is_centred else None


@contextlib.contextmanager
def _in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, IndexError, OverflowError, MemoryError, struct.error) as error:
        size = path.stat().st_size if path.is_file() else 0
        raise CheckpointError(
            f"{path.name} is truncated, damaged, or no GGUF file ({size:,} bytes): download it again."
        ) from error
