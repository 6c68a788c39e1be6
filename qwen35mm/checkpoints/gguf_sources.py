"""A GGUF file's tensors in the form of the family's own checkpoints.

The package `gguf` (the extra of that name) dequantises. We undo what llama.cpp's converter (conversion/qwen.py and
qwen3vl.py) changes: it adds 1 to norms, stores A_log as -exp(A_log), and moves a Gated DeltaNet layer's value heads
from beside their key head to the order of repeated key heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from qwen35mm.checkpoints.gguf_blocks import BLOCKS, grouped_rows
from qwen35mm.checkpoints.gguf_files import GgufFile, GgufTensor
from qwen35mm.checkpoints.safetensors_files import StoredTensor
from qwen35mm.checkpoints.sources import Source, damaged
from qwen35mm.checkpoints.tensor_names import EMBEDDING, LM_HEAD, MTP_PREFIX, TEXT_PREFIX, VISION_PREFIX
from qwen35mm.errors import CheckpointError
from qwen35mm_kernels.cpu.native.products import GroupedRows, Groups

TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M", "MXFP4", "NVFP4"),
)
# Float32 values made at a time.
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
_MTP = {
    "nextn.eh_proj.weight": "fc.weight",
    "nextn.enorm.weight": "pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "norm.weight",
}
_TOWER = {
    f"{ours}.{end}": f"{theirs}.{end}"
    for ours, theirs in (
        ("attn_qkv", "attn.qkv"), ("attn_out", "attn.proj"), ("ffn_up", "mlp.linear_fc1"),
        ("ffn_down", "mlp.linear_fc2"), ("ln1", "norm1"), ("ln2", "norm2"))
    for end in ("weight", "bias")
}  # fmt: skip


@dataclass(frozen=True)
class GgufSource(Source):
    """A tensor, or one expert's part of it, in the form of the family's own checkpoints.

    Attributes:
        tensors: the file's tensors: one for each of a patch embedding's two frames, else one.
        expert: the index of its matrix in the file's stack.
        row_order, column_order: the file's index of each row and column; None if unchanged.
        change: undoes the converter's arithmetic.
    """

    tensors: tuple[GgufTensor, ...]
    expert: int | None = None
    row_order: np.ndarray | None = None
    column_order: np.ndarray | None = None
    change: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        return self.stored[""].dtype

    def rows(self, width: int, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        stored, *others = map(self._matrix, self.tensors)
        if others:
            yield self._several(stored, *others).reshape(-1, width)
            return
        at_once = max(1, _VALUES_AT_ONCE // self.shape[-1])
        for start in range(0, len(stored), at_once):
            part = slice(start, start + at_once)
            yield self._numbers(stored[part if self.row_order is None else self.row_order[part]]).reshape(-1, width)

    @property
    def groups(self) -> Groups | None:
        blocks = BLOCKS.get(self.kind)
        if blocks is None or len(self.tensors) > 1 or len(self.shape) != 2:
            return None
        return blocks.groups if self._group_order(blocks.groups.width) is not None else None

    def grouped_rows(self) -> Iterator[GroupedRows]:
        (tensor,), groups = self.tensors, self.groups
        stored = self._matrix(tensor)
        assert groups is not None
        order = self._group_order(groups.width)
        assert order is not None
        at_once = max(1, _VALUES_AT_ONCE // self.shape[1])
        for start in range(0, len(stored), at_once):
            part = slice(start, start + at_once)
            rows = grouped_rows(self.kind, stored[part if self.row_order is None else self.row_order[part]])
            if not all(x is None or bool((x * 256).isfinite().all()) for x in (rows.scales, rows.minima)):
                raise damaged(self.name, self.stored, "holds values that are not finite")
            if self.column_order is not None:
                minima = None if rows.minima is None else rows.minima[:, order]
                rows = GroupedRows(rows.integers[:, self.column_order], rows.scales[:, order], minima)
            yield rows

    def _group_order(self, width: int) -> np.ndarray | None:
        """The file's index of each group of columns; None if the order cuts groups."""
        if self.column_order is None:
            return np.arange(self.shape[1] // width)
        firsts = self.column_order[::width]
        is_whole = (self.column_order.reshape(-1, width) == firsts[:, None] + np.arange(width)).all()
        return firsts // width if is_whole and not (firsts % width).any() else None

    def _matrix(self, tensor: GgufTensor) -> np.ndarray:
        """[rows, bytes] uint8, mapped from the file."""
        data = tensor.data()
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return (data if self.expert is None else data[self.expert]).reshape(rows, -1)

    def _several(self, *frames: np.ndarray) -> torch.Tensor:
        """A patch's two frames: [out, channels, height, width] each -> [out, channels, 2, height, width]."""
        out, channels, _, *size = self.shape
        return torch.stack([self._numbers(each).view(out, channels, *size) for each in frames], dim=2)

    def _numbers(self, stored: np.ndarray) -> torch.Tensor:
        from gguf.quants import dequantize

        # A copy: floats still lie in the read-only file. A later check finds values that aren't finite.
        with np.errstate(all="ignore"):
            found = torch.from_numpy(np.array(dequantize(stored, self.tensors[0].kind), dtype=np.float32))
        found = found if self.change is None else self.change(found)
        if not bool(found.isfinite().all()):
            raise damaged(self.name, self.stored, "holds values that are not finite")
        return found if self.column_order is None else found[:, self.column_order]


def gguf_sources(files: Sequence[GgufFile], *, with_mtp: bool = False) -> dict[str, Source]:
    """The tensors of a model's files, by the family's own names.

    Args:
        with_mtp: include those of multi-token prediction, which come as the blocks behind the decoder's.

    Raises:
        CheckpointError: a tensor has an unreadable type, isn't one of the family's, or comes twice.
    """
    text = files[0]
    num_blocks = text.value(int, text.own("block_count"))
    num_layers = num_blocks - text.value(int, text.own("nextn_predict_layers"), 0)
    heads = ValueHeads.of(text)
    found: dict[str, Source] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if (kind := tensor.stored.dtype) not in TYPES:
                raise CheckpointError(
                    f"{name} in {file.path.name} is {kind}, which isn't read: {', '.join(TYPES)} are."
                )
            layer = _LAYER.fullmatch(name)
            mtp_index = int(layer["index"]) - num_layers if layer and not layer["tower"] else -1
            is_mtp = 0 <= mtp_index < num_blocks - num_layers
            if is_mtp and not with_mtp:
                continue
            if name == "v.patch_embd.weight.1":
                continue  # goes with the first
            theirs = _mtp_name(layer, mtp_index) if layer and is_mtp else _name(name, layer)
            if theirs is None:
                raise CheckpointError(f"{file.path.name} holds {name}, which no Qwen3.5 model has. Use another file.")
            for source in _sources(file, name, theirs, tensor, heads):
                if source.name in found:
                    raise CheckpointError(f"{name} in {file.path.name} is in another file of the model, too.")
                found[source.name] = source
    return found


@dataclass(frozen=True)
class ValueHeads:
    """A GDN layer's value heads: GGUF has the first of each key head, then the second of each, and so on."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, file: GgufFile) -> ValueHeads:
        keys = ("group_count", "time_step_rank", "state_size", "inner_size")
        sizes = num_key_heads, num_value_heads, *_ = tuple(file.value(int, file.own(f"ssm.{key}")) for key in keys)
        is_sane = all(0 < size < 1 << 20 for size in sizes)
        if not is_sane or num_value_heads % num_key_heads or sizes[3] % num_value_heads:
            raise CheckpointError(f"{file.path.name}: its Gated DeltaNet heads can't be {sizes}. Download it again.")
        return cls(num_key_heads, num_value_heads, sizes[2], sizes[3] // num_value_heads)

    def order(self, width: int, before: int = 0) -> np.ndarray:
        """The file's index of each row: heads of `width` rows, after `before` rows that stay."""
        stored = np.arange(self.num_value_heads * width)
        repeated = stored.reshape(self.num_value_heads // self.num_key_heads, self.num_key_heads, width)
        return np.concatenate([np.arange(before), before + repeated.swapaxes(0, 1).ravel()])

    def row_order(self, name: str) -> np.ndarray | None:
        """The order for a tensor with this family name; None if its rows stay."""
        last = name.rpartition("linear_attn.")[2]
        keys = 2 * self.num_key_heads * self.key_dim
        return {
            "in_proj_qkv.weight": lambda: self.order(self.value_dim, keys),
            "conv1d.weight": lambda: self.order(self.value_dim, keys),
            "in_proj_z.weight": lambda: self.order(self.value_dim),
            "in_proj_a.weight": lambda: self.order(1),
            "in_proj_b.weight": lambda: self.order(1),
        }.get(last, lambda: None)()


def _sources(file: GgufFile, name: str, theirs: str, tensor: GgufTensor, heads: ValueHeads) -> Iterator[GgufSource]:
    """One tensor's sources; `theirs` is its name in the family, with {} for an expert."""
    shape: tuple[int, ...] = tensor.stored.shape
    parts: Mapping[str, StoredTensor] = {"": tensor.stored}
    dimensions = {"{}": 3, ".patch_embed.proj.weight": 4, ".conv1d.weight": 2}
    if len(shape) != next((count for part, count in dimensions.items() if part in theirs), min(len(shape), 2)):
        raise damaged(theirs, parts, f"has a shape that can't be: {list(shape)}")
    if "{}" in theirs:
        for expert in range(shape[0]):
            yield GgufSource(theirs.format(expert), shape[1:], parts, (tensor,), expert)
        return
    if name == "v.patch_embd.weight":
        second = file.tensors.get(f"{name}.1")
        if second is None or (second.stored.shape, second.kind) != (shape, tensor.kind):
            raise damaged(theirs, parts, "has no second frame of the same kind")
        yield GgufSource(theirs, (*shape[:2], 2, *shape[2:]), parts, (tensor, second))
        return
    rows, columns, change = heads.row_order(theirs), None, None
    if len(shape) == 1:
        columns, change = heads.order(1) if theirs.endswith((".A_log", ".dt_bias")) else None, _change(theirs)
    elif theirs.endswith("linear_attn.out_proj.weight"):
        columns = heads.order(heads.value_dim)
    if any(order is not None and len(order) != size for order, size in ((rows, shape[0]), (columns, shape[-1]))):
        raise damaged(theirs, parts, f"is {list(shape)}, which doesn't fit its value heads")
    if theirs.endswith("conv1d.weight"):
        shape = (shape[0], 1, shape[-1])
    elif theirs.endswith("shared_expert_gate.weight"):
        shape = (1, shape[-1])
    yield GgufSource(theirs, shape, parts, (tensor,), None, rows, columns, change)


def _name(name: str, layer: re.Match[str] | None) -> str | None:
    """The family's name of a tensor, with {} for an expert."""
    if layer is None:
        return _TEXT.get(name)
    found = (_TOWER if layer["tower"] else _LAYERS).get(layer["name"])
    prefix = f"{VISION_PREFIX}blocks." if layer["tower"] else f"{TEXT_PREFIX}layers."
    return None if found is None else f"{prefix}{layer['index']}.{found}"


def _mtp_name(layer: re.Match[str], index: int) -> str | None:
    """The same for a tensor of multi-token prediction, in its block `index`."""
    if (found := _MTP.get(layer["name"])) is not None:
        return MTP_PREFIX + found
    found = _LAYERS.get(layer["name"])
    return None if found is None else f"{MTP_PREFIX}layers.{index}.{found}"


def _change(name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The function that undoes the converter's arithmetic."""
    if name.endswith(".A_log"):
        return lambda x: torch.log(-x)
    is_norm = name.endswith(("norm.weight", "norm_embedding.weight", "norm_hidden.weight"))
    is_centred = name.startswith((TEXT_PREFIX, MTP_PREFIX)) and is_norm and "linear_attn.norm" not in name
    return (lambda x: x - 1) if is_centred else None
