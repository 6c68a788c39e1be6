"""Groups a checkpoint's tensors into matrices, by its `quantization_config` and the tensors' names and dtypes.

A quantised matrix is several tensors: codes, scales, sometimes zero points and an order. They are grouped under the
matrix's name in an unquantised checkpoint; everything else stays as it is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qwen35mm.checkpoints.float_formats import Bitsandbytes4, Fp4, Fp8
from qwen35mm.checkpoints.gguf_files import GgufFile
from qwen35mm.checkpoints.gguf_sources import gguf_sources
from qwen35mm.checkpoints.integer_formats import (
    FLOATS,
    Awq,
    Gptq,
    PackedIntegers,
    PairedRows,
    PlainIntegers,
    RowIntegers,
    stored_bits,
)
from qwen35mm.checkpoints.safetensors_files import StoredTensor, read_headers
from qwen35mm.checkpoints.shards import GGUF_NOTE, find_shards, some
from qwen35mm.checkpoints.sources import INPUT_SCALE, Format, PlainSource, QuantisedSource, Source, damaged
from qwen35mm.checkpoints.tensor_names import MTP_PREFIX, family_name
from qwen35mm.errors import ConfigError

Parts = dict[str, StoredTensor]
# Patterns for a matrix's name and its part's.
_WORDS = re.compile(r"(?P<module>.+)\.(?P<part>qweight|qzeros|scales|g_idx)")
_BLOCKS = re.compile(r"(?P<name>.+)_(?P<part>scale)(_inv)?")
_COMPRESSED = re.compile(r"(?P<name>.+\.weight)_(?P<part>packed|scale|scale_2|zero_point|g_idx|shape|global_scale)")
_BITSANDBYTES = re.compile(
    r"(?P<name>.+\.weight)\.(?P<part>absmax|quant_map|nested_absmax|nested_quant_map|quant_state)(\.bitsandbytes__\w+)?"
    r"|(?P<module>.+)\.(?P<row_part>SCB|weight_format)"
)
_SMOOTHED = re.compile(rf"(?P<module>.+)\.(?P<part>{INPUT_SCALE})")
# Scales for activations, which other engines quantise; we keep activations in the model's precision.
_OF_ACTIVATIONS = re.compile(
    r".+[._](input_(scale|zero_point|global_scale)|activation_scale(_inv)?|[qkv]_scale|output_scale)"
)
# AutoRound's types of weights that the tensors' dtypes define; mx_int and nvfp4_v2 have scales of their own.
_AUTO_ROUND_TYPES = re.compile(
    r"(opt_)?(rtn_)?(int|int_sym|int_sym_gptq|int_sym_neuqi|int_asym|(mx|nv)_fp\d?(_rceil|_rtn|_with_static_gs)?"
    r"|(block_)?fp8?(_sym|_e4m3)?)"
)


def read_checkpoint(
    folder: Path, quantization: Mapping[str, Any] | None, *, with_mtp: bool = False
) -> dict[str, Source]:
    """The tensors of a folder's files; raises as `read_sources`.

    Args:
        with_mtp: include those of multi-token prediction.
    """
    shards = find_shards(folder)
    if (folder / GGUF_NOTE).is_file():
        return gguf_sources([GgufFile(path) for path in shards], with_mtp=with_mtp)
    stored = {family_name(name): tensor for name, tensor in read_headers(shards).items()}
    return read_sources(
        {name: tensor for name, tensor in stored.items() if with_mtp or not name.startswith(MTP_PREFIX)}, quantization
    )


def read_sources(stored: Mapping[str, StoredTensor], quantization: Mapping[str, Any] | None) -> dict[str, Source]:
    """A checkpoint's tensors by their names in an unquantised one.

    Args:
        stored: from the files' headers.
        quantization: config.json's `quantization_config`.

    Raises:
        CheckpointError: parts of a matrix are missing, don't fit together, or have an unknown format.
        ConfigError: an unknown variant of a quantisation method.
    """
    if quantization is None:
        return {name: PlainSource.of(tensor) for name, tensor in stored.items()}
    names, format_of = _reader(quantization)
    found: dict[str, Source] = {}
    quantised: dict[str, Parts] = defaultdict(dict)
    for name, tensor in stored.items():
        if _OF_ACTIVATIONS.fullmatch(name):
            continue
        if match := next(filter(None, (pattern.fullmatch(name) for pattern in names)), None):
            groups = match.groupdict()
            matrix = groups.get("name") or f"{groups['module']}.weight"
            quantised[matrix][groups.get("part") or groups["row_part"]] = tensor
        else:
            found[name] = PlainSource.of(tensor)
    for name, parts in quantised.items():
        if name in found:
            parts["codes"] = found.pop(name).stored[""]
        format = format_of(parts)
        if format is None:
            what = ", ".join(f"{part} ({tensor.dtype})" for part, tensor in sorted(parts.items()))
            raise damaged(name, parts, f"has {what}: an unknown format")
        found[name] = QuantisedSource.of(name, parts, format)
    return found


class _Reader(NamedTuple):
    """One quantisation method: patterns for the names of matrices' parts, and a function for their format."""

    names: tuple[re.Pattern[str], ...]
    format_of: Callable[[Parts], Format | None]


def _reader(quantization: Mapping[str, Any]) -> _Reader:
    method = quantization.get("quant_method")
    if method == "gptq":
        is_ordered = quantization.get("desc_act") is True
        bits, offset = _bits(quantization, 2, 3, 4, 8), _zero_offset(quantization)
        # GPTQModel may quantise some matrices with other bits.
        return _Reader((_WORDS,), lambda parts: Gptq(stored_bits(parts) or bits, offset, is_ordered))
    if method == "awq":
        _bits(quantization, 4)
        _choice(quantization, "version", "gemm")
        return _Reader((_WORDS,), lambda _: Awq())
    if method == "auto-round":
        return _auto_round(quantization)
    if method == "bitsandbytes":
        return _Reader((_BITSANDBYTES,), lambda parts: RowIntegers() if "SCB" in parts else Bitsandbytes4())
    if method == "fp8":
        block = quantization.get("weight_block_size")
        return _Reader((_BLOCKS,), lambda parts: _scaled(parts, block, ()))
    assert method in ("compressed-tensors", "modelopt"), "config.json was read before"
    block, also = _block_structure(quantization), _also(quantization)
    return _Reader((_COMPRESSED, _SMOOTHED), lambda parts: _scaled(parts, block, also))


def _auto_round(quantization: Mapping[str, Any]) -> _Reader:
    """AutoRound's own format: GPTQ's or AWQ's words, or floats with scales, each matrix with bits of its own."""
    packing = str(quantization.get("packing_format") or quantization.get("backend") or "auto_round:auto_gptq").lower()
    if "mlx" in packing or "e5m3" in packing:
        raise _error(f"has packing_format {packing!r}, which can't be read. Use another checkpoint.")
    if rotated := [key for key, value in quantization.items() if value and ("rotation" in key or "spinquant" in key)]:
        raise _error(f"has a {rotated[0]}: its matrices fit rotated inputs alone. Use another checkpoint.")
    layers = quantization.get("extra_config")
    for each in (quantization, *(layers.values() if isinstance(layers, Mapping) else ())):
        type_ = each.get("data_type") if isinstance(each, Mapping) else None
        if type_ is not None and not _AUTO_ROUND_TYPES.fullmatch(str(type_)):
            raise _error(f"has data_type {type_!r}, which can't be read. Use another checkpoint.")
    bits, group = _bits(quantization, 2, 3, 4, 5, 6, 7, 8, 16), quantization.get("group_size")
    # GPTQ's first format stores zero points less one; AutoRound's and GPTQModel's don't.
    offset = 1 if "gptq" in packing and "gptqmodel" not in packing else 0
    block = group if isinstance(group, list | tuple) else None

    def format_of(parts: Parts) -> Format | None:
        if "qweight" not in parts:
            return _scaled(parts, block, ())
        if "awq" not in packing:
            return Gptq(stored_bits(parts) or bits, offset)
        return Awq() if stored_bits(parts) in (4, None) else None

    return _Reader((_WORDS, _COMPRESSED, _BLOCKS), format_of)


def _scaled(parts: Parts, block: Any, also: tuple[str, ...]) -> Format | None:
    """The format of codes and scales, from the dtype of the codes."""
    if "codes" in parts and parts["codes"].dtype == "U8":
        # ModelOpt's names: it stores packed numbers as a plain weight, and multiplies by the global scale.
        if "scale_2" not in parts and "scale" in parts and parts["scale"].dtype in FLOATS:
            return PairedRows()
        parts["packed"] = parts.pop("codes")
        if "scale_2" in parts:
            parts["global_scale"] = parts.pop("scale_2")
        return Fp4(divides=False)
    codes = parts.get("packed") or parts.get("codes")
    match (None if codes is None else codes.dtype), "packed" in parts:
        case "I32", True:
            return PackedIntegers(also)
        case "U8", True:
            return Fp4()
        case "I8", False:
            return PlainIntegers(tuple(part for part in also if part != "g_idx"))
        case "F8_E4M3", False:
            return Fp8(_pair(block))
    return None


def _pair(block: Any) -> tuple[int, int] | None:
    if block is None:
        return None
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise _error(f"names blocks of {block!r}; two whole numbers are expected, as [128, 128].")
    return block[0], block[1]


def _schemes(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The weight schemes of compressed-tensors' groups."""
    groups = quantization.get("config_groups")
    weights = (
        [each.get("weights") for each in groups.values() if isinstance(each, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    return [each for each in weights if isinstance(each, Mapping)]


def _also(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    """The parts beside codes and scales that all groups announce."""
    schemes = _schemes(quantization)
    has = {
        "zero_point": [each.get("symmetric") is False for each in schemes],
        "g_idx": [each.get("actorder") == "group" for each in schemes],
    }
    return tuple(part for part, said in has.items() if said and all(said))


def _block_structure(quantization: Mapping[str, Any]) -> Any:
    """The block size, which must be the same in all groups that have one."""
    blocks = [each["block_structure"] for each in _schemes(quantization) if each.get("block_structure")]
    if any(each != blocks[0] for each in blocks):
        raise _error("names blocks of several sizes, which isn't read here. Use another checkpoint.")
    return blocks[0] if blocks else None


def _bits(quantization: Mapping[str, Any], *known: int) -> int:
    bits = quantization.get("bits", quantization.get("w_bit", 4))
    if bits not in known or type(bits) is not int:
        raise _error(f"names {bits!r} bits; {some([str(each) for each in known])} can be read. Use another checkpoint.")
    return bits


def _zero_offset(quantization: Mapping[str, Any]) -> int:
    """The number that GPTQ subtracts from zero points before storing them."""
    _choice(quantization, "checkpoint_format", "gptq", "gptq_v2")
    return 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1


def _choice(quantization: Mapping[str, Any], key: str, *known: str) -> None:
    value = quantization.get(key)
    if value is not None and str(value).lower() not in known:
        raise _error(f"has {key} {value!r}; {some(list(known))} can be read. Use another checkpoint.")


def _error(what: str) -> ConfigError:
    return ConfigError(f"config.json: quantization_config {what}")
