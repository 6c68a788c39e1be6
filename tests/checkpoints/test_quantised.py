"""Quantised matrices: the numbers are those that the libraries which wrote them read, and damage is named."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qwen35mm.checkpoints.integer_formats import unpack
from qwen35mm.checkpoints.quantised import read_sources
from qwen35mm.checkpoints.safetensors_files import new_buffer, read_headers
from qwen35mm.checkpoints.sources import Source
from qwen35mm.errors import CheckpointError, ConfigError
from qwen35mm_kernels.cpu.native.products import Groups
from qwen35mm_kernels.reference.fp8 import Blocks
from tests.checkpoints import others, packers
from tests.kernels.compare import dequantised

Tensors = dict[str, torch.Tensor]

OTHERS = load_file(others.FILE)
CASES = sorted({name.split("/")[0] for name in OTHERS})


def config_of(case: str) -> dict[str, Any]:
    method, *rest = case.split("-")
    values: dict[str, Any] = {"quant_method": method}
    return values | {"bits": int(rest[0]), "group_size": others.GROUP} if method == "gptq" else values


def parts_of(case: str) -> Tensors:
    return {name.split("/")[1]: x for name, x in OTHERS.items() if name.split("/")[0] == case}


def stored_name(part: str) -> str:
    """How a checkpoint names a part of the matrix `a.weight`."""
    if part in ("qweight", "qzeros", "scales", "g_idx", "SCB"):
        return f"a.{part}"
    return "a.weight" if part == "codes" else f"a.weight.{part}"


def source_of(folder: Path, tensors: Tensors, quantization: Mapping[str, Any] | None) -> Source:
    path = folder / "model.safetensors"
    save_file({name: x.contiguous() for name, x in tensors.items()}, path)
    found = read_sources(read_headers([path]), quantization)
    assert set(found) == {"a.weight"}
    return found["a.weight"]


def numbers(source: Source) -> torch.Tensor:
    """Its numbers; as integers, where it is held as some, it has the same."""
    rows = [rows.float().clone() for rows in source.rows(source.shape[-1], new_buffer())]
    found = torch.cat(rows).view(source.shape)
    if isinstance(groups := source.groups, Groups):
        held = torch.cat([dequantised(rows, groups.width) for rows in source.grouped_rows()])
        assert torch.equal(held, found)
    return found


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_that_its_own_library_reads(case: str, tmp_path: Path) -> None:
    parts = parts_of(case)
    expected = parts.pop("expected")
    source = source_of(tmp_path, {stored_name(part): x for part, x in parts.items()}, config_of(case))
    assert source.shape == expected.shape
    if case == "bitsandbytes-int8":  # it divides by 127 as a product with a rounded 1 / 127
        torch.testing.assert_close(numbers(source), expected, rtol=1e-6, atol=0)
    else:
        assert torch.equal(numbers(source), expected)


@given(bits=st.integers(1, 8), values=st.lists(st.integers(0, 255), min_size=32, max_size=96))
def test_fields_come_out_as_they_went_in(bits: int, values: list[int]) -> None:
    values = [value % (1 << bits) for value in values[: len(values) // 32 * 32]]
    whole = sum(value << (bits * index) for index, value in enumerate(values))
    words = torch.frombuffer(bytearray(whole.to_bytes(len(values) * bits // 8, "little")), dtype=torch.int32)
    assert unpack(words[None], bits)[0].tolist() == values


# What compressed-tensors calls its ways: name, bits, type, and what else a scheme says.
GROUPS = {"strategy": "group", "group_size": 32}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"pack-{b}": ("PackedQuantizationCompressor", {"num_bits": b, "type": "int", **GROUPS}) for b in (2, 3, 4, 6, 8)
    },
    "pack-row": ("PackedQuantizationCompressor", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "int-row": ("IntQuantizationCompressor", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int-whole": ("IntQuantizationCompressor", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "float-row": ("FloatQuantizationCompressor", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float-whole": ("FloatQuantizationCompressor", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "float-block": (
        "FloatQuantizationCompressor",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    ),
    "mxfp8": ("MXFP8QuantizationCompressor", {"num_bits": 8, "type": "float", "scale_dtype": torch.uint8, **GROUPS}),
    "mxfp4": ("MXFP4PackedCompressor", {"num_bits": 4, "type": "float", "scale_dtype": torch.uint8, **GROUPS}),
}


@pytest.mark.parametrize(
    ("scheme", "symmetric"),
    [(name, s) for name in SCHEMES for s in (True, False) if s or "float" not in SCHEMES[name][1]["type"]],
)
def test_numbers_are_those_that_compressed_tensors_reads(scheme: str, symmetric: bool, tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors", reason="it needs Python 3.11")
    from compressed_tensors import compressors
    from compressed_tensors.quantization.utils import calculate_qparams

    assert library.__version__
    name, values = SCHEMES[scheme]
    arguments = library.quantization.QuantizationArgs(**values, symmetric=symmetric)
    whole = library.quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    matrix = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    cut = {"channel": matrix[:, None], "tensor": matrix.view(1, 1, -1)}
    rows = cut.get(values["strategy"], matrix.unflatten(1, (-1, 32)))
    if scheme == "float-block":
        rows = matrix.view(3, 16, 3, 32).transpose(1, 2).flatten(2)
    scale, zero_point = calculate_qparams(rows.amin(2), rows.amax(2), arguments)
    if values["strategy"] == "tensor":
        scale, zero_point = scale.flatten(), zero_point.flatten()
    state = {"weight": matrix, "weight_scale": scale, "weight_zero_point": zero_point}
    compressor = getattr(compressors, name)
    made = compressor.compress(state, whole)
    expected = compressor.decompress(dict(made), whole)["weight"].float()
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": values}}}
    source = source_of(tmp_path, {f"a.{part}": x for part, x in made.items()}, config)
    assert torch.equal(numbers(source), expected)
    assert (expected - matrix).abs().max() > 0


def nvfp4(matrix: torch.Tensor, *, divides: bool) -> tuple[Tensors, torch.Tensor]:
    """A matrix [out, in] by NVFP4's definition (e2m1 in groups of 16, e4m3 scales, one global), and what that says."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([values, -values])
    whole = 448 * 6 / matrix.abs().max()
    groups = matrix.unflatten(1, (-1, 16))
    scale = (groups.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
    scales = (scale.float() / whole)[..., None]
    codes = (groups[..., None] / scales[..., None] - table).abs().argmin(-1).to(torch.uint8).flatten(1)
    expected = table[codes.int()] * scales.expand_as(groups).flatten(1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    if divides:
        return {"a.weight_packed": packed, "a.weight_scale": scale, "a.weight_global_scale": whole.view(1)}, expected
    return {
        "a.weight": packed,
        "a.weight_scale": scale,
        "a.weight_scale_2": 1 / whole,
        "a.input_scale": whole,
    }, expected


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt"])
def test_nvfp4_is_read_as_either_library_writes_it(method: str, tmp_path: Path) -> None:
    # compressed-tensors' own reader rounds to bfloat16.
    matrix = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    tensors, expected = nvfp4(matrix, divides=method == "compressed-tensors")
    found = numbers(source_of(tmp_path, tensors, {"quant_method": method}))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("stacked", [False, True])
def test_blocks_at_the_edges_are_narrower(stacked: bool, tmp_path: Path) -> None:
    codes = torch.randn(2, 40, 70, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(1))
    codes, scales = (codes, scales) if stacked else (codes[0], scales[0])
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    found = numbers(source_of(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scales}, config))
    rows, columns = torch.arange(40) // 32, torch.arange(70) // 32
    assert torch.equal(found, codes.float() * scales[..., rows, :][..., columns])


@st.composite
def packed_matrices(draw: st.DrawFn, method: str) -> packers.Packed:
    """Matrices of any shape that a format can have."""
    whole, flag = lambda low, high: draw(st.integers(low, high)), lambda: draw(st.booleans())
    chance, out, groups = packers.Chance(whole(0, 2**31)), whole(1, 24), whole(1, 4)
    match method:
        case "gptq" | "packed":
            bits = draw(st.sampled_from((2, 3, 4, 8)))
            out, group = packers.whole_words(out, whole(1, 40), bits)
            ordered, chosen = flag(), flag()
            if method == "gptq":
                at = (chance, out, group * groups)
                return packers.gptq(*at, bits=bits, group=group, version=1 + chosen, ordered=ordered)
            at = (chance, whole(1, 24), group * groups)
            return packers.packed_integers(*at, bits=bits, group=group, symmetric=chosen, ordered=ordered)
        case "auto-round":
            packing = draw(st.sampled_from(("auto_round:auto_gptq", "auto_round", "auto_round:auto_awq")))
            bits, group = whole(2, 8), 32 * whole(1, 2)
            at = (chance, 32 * whole(1, 2), group * groups)
            return packers.auto_round(*at, packing=packing, bits=bits, group=group)
        case "paired":
            group = whole(1, 40)
            return packers.paired_rows(chance, 2 * out, group * groups, group=group, smoothed=flag())
        case "awq":
            group = whole(1, 40)
            return packers.awq(chance, 8 * whole(1, 4), group * groups, group=group)
        case "int8":
            group = whole(1, 40)
            return packers.plain_integers(chance, out, group * groups, group=group, symmetric=flag())
        case "fp8":
            block = whole(1, 20), whole(1, 20)
            return packers.fp8(chance, out, whole(1, 70), block=block, per_row=flag())
        case "fp4":
            group, kind = 2 * whole(1, 20), draw(st.sampled_from(("mxfp4", "nvfp4", "modelopt")))
            return packers.fp4(chance, out, group * groups, kind=kind, group=group)
        case "bitsandbytes4":
            return packers.bitsandbytes4(chance, out, whole(1, 70), run=whole(1, 64), nested=flag())
    return packers.bitsandbytes8(chance, out, whole(1, 70))


METHODS = (
    ("gptq", "packed"),
    ("awq", "int8", "fp4"),
    ("auto-round", "paired"),
    ("fp8", "bitsandbytes4", "bitsandbytes8"),
)


@pytest.mark.parametrize("methods", METHODS, ids=" ".join)
@given(data=st.data())
def test_numbers_are_those_that_the_format_defines(methods: tuple[str, ...], data: st.DataObject) -> None:
    made = data.draw(st.sampled_from(methods).flatmap(packed_matrices))
    with tempfile.TemporaryDirectory() as folder:
        source = source_of(Path(folder), {f"a.{part}": x for part, x in made.tensors.items()}, made.quantization)
        assert source.shape == made.expected.shape
        assert torch.equal(numbers(source), made.expected)


@pytest.mark.parametrize("width", [6, 7])
def test_blocks_of_one_row_are_no_wider_at_the_edge(width: int, tmp_path: Path) -> None:
    made = packers.fp8(packers.Chance(0), 3, width, block=(1, 4))
    source = source_of(tmp_path, {f"a.{part}": x for part, x in made.tensors.items()}, made.quantization)
    assert torch.equal(numbers(source), made.expected)


@pytest.mark.parametrize(
    ("block", "shape", "kept"),
    [
        ((128, 128), (256, 384), Blocks(128)),
        ((1, 128), (256, 384), Blocks(1)),
        ((1, 384), (256, 384), Blocks(1, is_whole=True)),
        ((1, 200), (4, 256), None),
        ((64, 128), (256, 384), None),
    ],
)
def test_blocks_that_the_fp8_product_takes_stay_fp8(
    block: tuple[int, int], shape: tuple[int, int], kept: Blocks | None, tmp_path: Path
) -> None:
    made = packers.fp8(packers.Chance(0), *shape, block=block)
    source = source_of(tmp_path, {f"a.{part}": x for part, x in made.tensors.items()}, made.quantization)
    assert source.groups == kept


def test_modelopt_has_one_scale_for_a_matrix_in_fp8(tmp_path: Path) -> None:
    codes = torch.randn(8, 48, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.25)
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.input_scale": torch.tensor(2.0)}
    assert torch.equal(numbers(source_of(tmp_path, tensors, {"quant_method": "modelopt"})), codes.float() * 0.25)


def test_auto_round_may_store_floats_by_the_definitions_of_others(tmp_path: Path) -> None:
    for kind, group, data_type in (("nvfp4", 16, "nv_fp"), ("mxfp4", 32, "mx_fp")):
        made = packers.fp4(packers.Chance(0), 32, 64, kind=kind, group=group)
        config = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "data_type": data_type}
        source = source_of(tmp_path, {f"a.{part}": x for part, x in made.tensors.items()}, config)
        assert torch.equal(numbers(source), made.expected)
    made = packers.fp8(packers.Chance(0), 32, 64, block=(16, 32))
    config = {"quant_method": "auto-round", "packing_format": "auto_round:fp8", "bits": 8, "group_size": [16, 32]}
    source = source_of(tmp_path, {f"a.{part}": x for part, x in made.tensors.items()}, config)
    assert torch.equal(numbers(source), made.expected)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"data_type": "mx_int"}, "data_type 'mx_int'"),
        ({"extra_config": {"b": {"data_type": "nvfp4_v2"}}}, "data_type 'nvfp4_v2'"),
        ({"data_type": "fp8_to_int_sym"}, "data_type 'fp8_to_int_sym'"),
        ({"packing_format": "auto_round:llm_compressor_nvfp4_e5m3"}, "packing_format 'auto_round:llm"),
        ({"rotation_config": {"block_size": 32}}, "rotated inputs"),
        ({"bits": 9}, "names 9 bits"),
    ],
)
def test_variants_of_auto_round_that_would_be_read_wrongly_are_refused(
    said: dict[str, Any], message: str, tmp_path: Path
) -> None:
    made = packers.auto_round(packers.Chance(0), 32, 64, packing="auto_round", bits=4, group=32)
    tensors = {f"a.{part}": x for part, x in made.tensors.items()}
    assert torch.equal(numbers(source_of(tmp_path, tensors, made.quantization)), made.expected)
    with pytest.raises(ConfigError, match=message):
        source_of(tmp_path, tensors, {**made.quantization, **said})


def test_awq_of_other_bits_is_refused(tmp_path: Path) -> None:
    made = packers.auto_round(packers.Chance(0), 32, 64, packing="auto_round", bits=5, group=32)
    tensors = {f"a.{part}": x for part, x in made.tensors.items()}
    with pytest.raises(CheckpointError, match="an unknown format"):
        source_of(tmp_path, tensors, {**made.quantization, "packing_format": "auto_round:auto_awq"})


def test_gptq_matrices_may_have_bits_of_their_own(tmp_path: Path) -> None:
    made = packers.gptq(packers.Chance(0), 32, 64, bits=8, group=32, ordered=False)
    tensors = {f"a.{part}": x for part, x in made.tensors.items()}
    assert torch.equal(numbers(source_of(tmp_path, tensors, {**made.quantization, "bits": 4})), made.expected)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "int8"])
def test_any_matrix_of_modelopt_may_scale_its_inputs(kind: str, tmp_path: Path) -> None:
    if kind == "int8":
        made = packers.plain_integers(packers.Chance(0), 32, 64, group=64, symmetric=True)
    else:
        made = packers.fp4(packers.Chance(0), 32, 64, kind="modelopt" if kind == "nvfp4" else kind, group=16)
    tensors = {f"a.{part}": x for part, x in made.tensors.items()}
    if kind == "mxfp4":
        tensors["a.weight"] = tensors.pop("a.weight_packed")
    columns = torch.linspace(0.5, 2, 64)
    source = source_of(tmp_path, {**tensors, "a.pre_quant_scale": columns}, {"quant_method": "modelopt"})
    assert torch.equal(numbers(source), made.expected * columns)
    assert source.groups is None
    with pytest.raises(CheckpointError, match=r"has a pre_quant_scale in F32 of \[32\], which doesn't fit \[32, 64\]"):
        source_of(tmp_path, {**tensors, "a.pre_quant_scale": columns[:32]}, {"quant_method": "modelopt"})


def broken(kind: str, made: packers.Packed) -> tuple[Tensors, dict[str, Any]]:
    """A matrix in four bits with something wrong."""
    tensors, config = {f"a.{part}": x.contiguous() for part, x in made.tensors.items()}, dict(made.quantization)
    scales = next(name for name in ("a.scales", "a.weight_scale") if name in tensors)
    match kind:
        case "nan" | "inf":
            tensors[scales][0, 0] = float(kind)
        case "no scale":
            del tensors[scales]
        case "another shape":
            tensors[scales] = tensors[scales][:-1].contiguous()
        case "another dtype":
            tensors[scales] = tensors[scales].view(torch.int16)
        case "zero point":
            tensors["a.qzeros"].fill_(-1)
        case "group":
            name = next(name for name in tensors if name.endswith("g_idx"))
            tensors[name][0] = 99
        case "no order":
            del tensors[next(name for name in tensors if name.endswith("g_idx"))]
        case "no zero point":
            del tensors["a.weight_zero_point"]
        case _:
            assert kind == "two ways"
            tensors["a.weight"] = torch.zeros(made.expected.shape)
    return tensors, config


@pytest.mark.parametrize(
    ("method", "kind", "said"),
    [
        *((method, kind, "scales that are not finite") for method in ("gptq-order", "awq", "packed")
          for kind in ("nan", "inf")),
        *((method, "no scale", r"lacks its scales?") for method in ("gptq-order", "awq", "packed")),
        *((method, "another shape", "fit") for method in ("gptq-order", "awq", "packed")),
        *((method, "another dtype", r"in I16, where F16 or BF16 or F32") for method in ("gptq-order", "awq", "packed")),
        *((method, "two ways", "has a.weight beside it") for method in ("gptq-order", "awq", "packed")),
        *((method, "group", "g_idx that names groups beyond") for method in ("gptq-order", "packed")),
        *((method, "no order", "lacks its g_idx") for method in ("gptq-order", "packed")),
        ("packed", "no zero point", "lacks its zero_point"),
        ("gptq", "zero point", "zero points out of the range of 4 bits"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_matrix_is_named(method: str, kind: str, said: str, tmp_path: Path) -> None:
    tensors, config = broken(kind, packers.METHODS[method](packers.Chance(0), 64, 64))
    with pytest.raises(CheckpointError, match=rf"^a\.weight in model\.safetensors .*{said}") as caught:
        numbers(source_of(tmp_path, tensors, config))
    assert str(caught.value).endswith("Download the checkpoint again, or take another one.")
