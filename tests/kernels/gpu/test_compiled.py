"""The kernels as compiled for cards that aren't here, as configured by default: registers, spills, matrix instructions.

Five seconds to half a minute a kernel, so that none is in `make test`.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

from qwen35mm_kernels.gpu import (
    attention_decode,
    attention_prefill,
    fp8,
    integers,
    moe_fp8,
    moe_integers,
    normed,
    rope_kv,
)
from qwen35mm_kernels.gpu.launch import Config
from qwen35mm_kernels.gpu.moe import _DEFAULTS
from tests.kernels.gpu.compiled import SHARED_BYTES, Compiled, Variant, compile_variants

pytestmark = pytest.mark.emulated

CARDS = (80, 90, 100)
CONSUMER_SHARED_BYTES = 99 << 10
# Half of a multiprocessor's 65,536 registers, for a program of 8 warps; and a third, for one of 4.
TWO_PROGRAMS, THREE_PROGRAMS = 128, 168
SCAN_TYPES = {
    "*bf16:16": "q_ptr k_ptr v_ptr solve_ptr attend_ptr out_ptr",
    "*fp32:16": "factors_ptr decay_ptr states_ptr",
    "*i64": "slots counts",
    "i32:16": "q_token q_head k_token k_head v_token v_head state_slot state_head state_k out_token out_head",
    "i32": "num_rows",
}
SCAN_CONSTANTS = {"K": 128, "GROUP": 2, "PRECISION": "tf32", "CHUNK": 64}
every_card = pytest.mark.parametrize("capability", CARDS)


def compiled(
    kernel: str, capability: int, config: Config, types: dict[str, str], constants: dict[str, Any]
) -> Compiled:
    """A kernel in bfloat16. types: the arguments' names, separated by blanks, by their Triton type."""
    signature = {name: kind for kind, names in types.items() for name in names.split()}
    name, constants = f"qwen35mm_kernels.gpu.{kernel}", {**constants, **config.blocks}
    variant = Variant(name, signature, constants, config.num_warps, config.num_stages)
    return compile_variants([variant], capability)[0]


def fits(found: Compiled, capability: int) -> None:
    """No spills, shared memory that the card has, and a Hopper card's own matrix instructions."""
    # Triton 3.7 lacks two registers on an A100.
    assert found.spilled_bytes <= (8 if capability == 80 else 0)
    assert found.shared_bytes <= SHARED_BYTES[capability]
    assert ("HGMMA" in found.instructions) == (capability == 90)
    assert "HMMA" not in found.instructions or capability == 80


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_gdn_scan(capability: int, num_stages: int) -> None:
    config = Config({"BLOCK_V": 32}, 4, num_stages)
    found = compiled("gdn_prefill:_scan_kernel", capability, config, SCAN_TYPES, SCAN_CONSTANTS)
    # Cards before Hopper lack 22 registers. With 8 warps they would lack none and compute four of five products twice.
    assert found.spilled_bytes <= (88 if capability < 90 else 0)
    assert found.shared_bytes <= SHARED_BYTES[capability]
    # One thread issues Blackwell's products for all warps.
    assert found.repeated == [1] * (5 if capability < 100 else 0)
    if num_stages == 2 and capability >= 90:
        # Registers come in eights.
        assert 2 * (-(-found.num_registers // 8) * 8) * 32 * config.num_warps <= 65_536
        assert 2 * found.shared_bytes <= SHARED_BYTES[capability]
    if capability == 90:
        assert "HGMMA" in found.instructions
        # Tiles come num_stages - 1 chunks ahead of their use, 16 bytes at a time: before the loop, and in it.
        tile_bytes = 2 * 64 * (128 + 128 + 64 + 64 + 32)
        assert found.instructions["LDGSTS"] == num_stages * tile_bytes // (16 * 32 * config.num_warps)


@pytest.mark.parametrize("capability", [80, 90])
def test_a_repeated_product_is_found(capability: int) -> None:
    """As the scan was launched before: 8 warps of 16 rows each for a chunk of 64."""
    found = compiled("gdn_prefill:_scan_kernel", capability, Config({"BLOCK_V": 32}, 8, 3), SCAN_TYPES, SCAN_CONSTANTS)
    assert found.repeated.count(2) >= 3


@every_card
def test_gdn_prepare(capability: int) -> None:
    found = compiled(
        "gdn_prepare:_prepare_kernel",
        capability,
        Config({"HEADS": 1}, 4, 1),
        {
            "*bf16:16": "q_ptr k_ptr a_ptr b_ptr A_log_ptr dt_bias_ptr solve_ptr attend_ptr",
            "*fp32:16": "factors_ptr decay_ptr",
            "*i64": "counts",
            "i32:16": "q_token q_head k_token k_head a_token b_token",
        },
        {"K": 128, "GROUP": 2, "PRECISION": "tf32", "CHUNK": 64},
    )
    fits(found, capability)
    if capability == 90:
        # Three programs to a multiprocessor hide each other's waiting.
        assert found.num_registers <= THREE_PROGRAMS


@pytest.mark.parametrize(
    ("group", "capability", "several"),
    [
        *((group, 90, several) for group in (1, 2, 3, 4) for several in (False, True)),
        (2, 80, False),
        (4, 80, False),
        (2, 100, False),
        (4, 100, False),
    ],
)
def test_two_gdn_decode_steps_fit_on_a_multiprocessor(group: int, capability: int, several: bool) -> None:
    found = compiled(
        "gdn_step:_gdn_decode_step_kernel",
        capability,
        Config({"BLOCK_V": 64 if group <= 2 else 32}, 8, 1),
        {
            "*bf16:16": "mixed conv_weight norm_weight conv_states out",
            "*fp32:16": "A_log dt_bias recurrent_states",
            "*i64:16": "slots sources",
            "fp32": "eps",
            "i32:16": "stride_mixed stride_conv_slot stride_recurrent_slot stride_out",
        },
        {"L2_EPS": 1e-6, "NUM_K_HEADS": 16, "GROUP": group, "GROUP_POW2": 4 if group == 3 else group}
        | {"K": 128, "V": 128, "WIDTH": 4, "WIDTH_POW2": 4, "SEVERAL": several, "EARLY": capability >= 90},
    )
    # The loop over a sequence's rows keeps the weights in registers: one program fits.
    assert several or found.num_registers <= TWO_PROGRAMS
    # Triton 3.5 and 3.6 lack up to four registers on an A100.
    assert found.spilled_bytes <= (16 if capability == 80 else 0)
    assert found.shared_bytes <= 48 << 10
    # The first tile and the next: 8 loads of 16 bytes to a thread each, and 8 stores; the rest is small.
    assert found.instructions["LDG"] <= 16 + 40
    assert found.instructions["STG"] <= 8 + 20
    if capability >= 90 and not several:
        # Taps, old inputs and the first tile are on their way before the projection is finished; nothing is written.
        assert found.before_wait["LDG"] >= (8 if group <= 2 else 4) + 12
        assert "STG" not in found.before_wait


_FEW_ROWS_TYPES = {
    "*bf16:16": "x_ptr delta_ptr norm_ptr matrix_ptr sum_ptr out_ptr",
    "i32": "num_rows",
    "fp32": "eps",
    "i32:16": "stride_x stride_delta stride_matrix",
}


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_weights_of_a_product_of_few_rows_are_asked_for_early(capability: int) -> None:
    signature = {name: kind for kind, names in _FEW_ROWS_TYPES.items() for name in names.split()}
    variants = [
        Variant(
            "qwen35mm_kernels.gpu.normed:_norm_linear_kernel",
            signature,
            {"WIDTH": 4096, "DEPTH": depth, "ROWS": rows, "EARLY": capability >= 90, **config.blocks}
            | {"NORM": has_norm, "ADD": has_norm, "SWIGLU": swiglu},
            config.num_warps,
            config.num_stages,
        )
        for rows in (1, 4)
        for has_norm, swiglu in ((False, False), (True, False), (True, True))
        for config in [normed._DEFAULTS[rows] if has_norm else normed._PLAIN]
        for depth in (1024, 4096)
    ]
    for variant, found in zip(variants, compile_variants(variants, capability), strict=True):
        rows, has_norm = variant.constants["ROWS"], variant.constants["NORM"]
        # Eight registers of one form on an A100.
        assert found.spilled_bytes <= (32 if capability == 80 else 0), variant
        # Ten programs of one row on a multiprocessor; of four rows eight, and with a norm two or three.
        assert found.num_registers <= (56 if rows == 1 else 176 if has_norm else 72), variant
        if capability >= 90:
            # The first tile, 16 bytes at a time; nothing is written.
            tile = variant.constants["BLOCK_N"] * variant.constants["BLOCK_K"]
            assert found.before_wait["LDG"] == tile // (8 * 32 * variant.num_warps), variant
            assert "STG" not in found.before_wait
        # Threads' sums meet once, at the end. An H200 has time for 15 instructions a weight.
        assert not [word for word in found.in_loop if word.startswith("BAR")], variant
        if capability == 90:
            weights = variant.constants["BLOCK_N"] * variant.constants["BLOCK_K"] // (32 * variant.num_warps)
            assert sum(found.in_loop.values()) <= weights * (7.5 if rows == 1 else 11.5 if has_norm else 9.5), variant


@every_card
def test_a_long_row_is_normed_16_bytes_at_a_time(capability: int) -> None:
    found = compiled(
        "norm:_rms_norm_kernel",
        capability,
        Config({"BLOCK_ROWS": 1}, 16, 1),
        {
            "*bf16:16": "x delta weight out",
            "i32": "num_rows",
            "fp32": "eps",
            "i32:16": "stride_x_outer stride_delta_outer",
        },
        {"inner": 1, "stride_x_inner": 5120, "stride_delta_inner": 5120, "D": 5120, "BLOCK_D": 8192}
        | {"ZERO_CENTRED": True, "ADD": True, "EARLY": capability >= 90},
    )
    # Two loads each of x, of delta and of the weight, two stores of x and of the result.
    assert (found.instructions["LDG"], found.instructions["STG"]) == (6, 4)
    assert found.spilled_bytes == 0
    assert found.num_registers <= 64


@every_card
def test_causal_conv1d(capability: int) -> None:
    found = compiled(
        "conv1d:_causal_conv1d_kernel",
        capability,
        Config({"BLOCK_T": 32, "BLOCK_C": 128}, 4, 1),
        {
            "*bf16:16": "x weight states out",
            "*i64": "slots counts",
            "i32": "stride_state_c",
            "i32:16": "stride_x stride_slot",
        },
        {"stride_state_w": 1, "C": 8192, "WIDTH": 4},
    )
    assert found.spilled_bytes == 0
    # Five programs of 4 warps on a multiprocessor.
    assert found.num_registers <= 96
    assert found.shared_bytes <= 48 << 10
    # 32 x 128 numbers are 4 loads of 16 bytes to a thread for each of the 4 taps; the rest is for the states.
    assert found.instructions["LDG"] <= 16 + 40


@every_card
def test_the_write_of_keys_and_values_needs_few_registers(capability: int) -> None:
    found = compiled(
        "rope_kv:_qk_norm_rope_write_kernel",
        capability,
        rope_kv._DEFAULT,
        {
            "*bf16:16": "qkv q_norm k_norm q k_cache v_cache",
            "*fp32:16": "cos sin",
            "*i64:16": "rows",
            "fp32": "eps",
            "i32": "num_tokens",
            "i32:16": "stride_qkv stride_cos stride_sin stride_k stride_v",
        },
        {"NUM_HEADS": 16, "NUM_KV_HEADS": 2, "HEAD_DIM": 256, "NUM_PAIRS": 32, "BLOCK_PAIRS": 32}
        | {"K_FORMAT": "bf16", "V_FORMAT": "bf16", "K_WIDTH": 256, "V_WIDTH": 256, "EARLY": capability >= 90},
    )
    assert found.spilled_bytes == 0
    assert found.num_registers <= 64
    assert found.shared_bytes <= 1024


_DECODE_TYPES = {
    "*fp32:16": "sums maxima weights",
    "*i32:16": "block_table lengths",
    "fp32": "scale_log2",
    "i32": "batch_size max_splits stride_table",
    "i32:16": "stride_q_sequence stride_q_head stride_k_row stride_k_head stride_v_row stride_v_head",
}
_DECODE_CONSTANTS = {
    **{"NUM_KV_HEADS": 2, "GROUP": 8, "HEAD_DIM": 256, "BLOCK_SIZE": 64, "BLOCK_B": 16, "BLOCK_G": 16},
    **{name: getattr(attention_decode, name) for name in ("MIN_SPLIT", "SPLIT_STEP", "MAX_SPLITS")},
}


@every_card
def test_attention_in_decode_keeps_loads_in_flight(capability: int) -> None:
    found = compiled(
        "attention_decode:_decode_splits_kernel",
        capability,
        attention_decode._DEFAULT[torch.bfloat16],
        {**_DECODE_TYPES, "*bf16:16": "q k_cache v_cache"},
        _DECODE_CONSTANTS | {"K_FORMAT": "bf16", "V_FORMAT": "bf16", "EARLY": capability >= 90},
    )
    assert found.spilled_bytes == 0
    # Three programs of a multiprocessor; on Blackwell Triton 3.7 leaves room for two.
    assert found.num_registers <= (THREE_PROGRAMS if capability < 100 else 184)
    # Two tiles of keys and values while a third is used, or nearly: less would mean the loop isn't pipelined.
    assert 64 << 10 <= found.shared_bytes <= CONSUMER_SHARED_BYTES
    assert found.instructions["HMMA"] > 0
    assert found.instructions["LDGSTS"] >= 48


@pytest.mark.parametrize(
    ("capability", "names"), [(80, ("fp8", "int4")), (90, ("int8", "int8")), (90, ("int4", "int4"))]
)
def test_codes_of_keys_and_values_are_copied_ahead(capability: int, names: tuple[str, str]) -> None:
    """Also for 8.0, which has no eight-bit floats: nothing spills."""
    found = compiled(
        "attention_decode:_decode_splits_kernel",
        capability,
        attention_decode._KEPT,
        {**_DECODE_TYPES, "*bf16:16": "q", "*u8:16": "k_cache v_cache"},
        _DECODE_CONSTANTS | {"K_FORMAT": names[0], "V_FORMAT": names[1], "EARLY": capability >= 90},
    )
    assert found.spilled_bytes == 0
    # Two programs to a multiprocessor, whose next tiles are on their way; those of eight bits leave room for three.
    assert found.num_registers <= (184 if "int4" in names else THREE_PROGRAMS)
    assert found.shared_bytes <= CONSUMER_SHARED_BYTES // 3
    # Codes come 16 bytes at a time, while others are worked on: a part's first, and in the loop. Two loads are scales.
    tile_bytes = 16 * 256 * sum({"int4": 4}.get(name, 8) for name in names) // 8
    copies = [count for word, count in found.in_loop.items() if word.startswith("LDGSTS") and ".128" in word]
    assert sum(copies) == 2 * tile_bytes // (16 * 128)
    assert sum(count for word, count in found.in_loop.items() if ".U16" in word and word.startswith("LDG.")) == 2
    assert not [word for word in found.in_loop if word.startswith("I2F")]
    assert found.instructions["HMMA"] > 0


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(
    ("capability", "config", "unit"),
    [
        (80, attention_prefill._SMALL, "HMMA"),
        (90, attention_prefill._LARGE, "HGMMA"),
        (100, attention_prefill._BLACKWELL, "UTCHMMA"),
    ],
)
def test_attention_in_prefill_uses_a_cards_matrix_units(
    capability: int, config: Config, unit: str, in_parts: bool
) -> None:
    found = compiled(
        "attention_prefill:_prefill_kernel",
        capability,
        config,
        {
            "*bf16:16": "q gate k v out",
            "*fp32:16": "sums maxima weights",
            "*i32:16": "block_table split_lengths",
            "*i64": "lengths counts",
            "fp32": "scale_log2",
            "i32": "num_rows",
            "i32:16": "stride_q_token stride_q_head stride_gate_token stride_gate_head "
            "stride_k_row stride_k_head stride_v_row stride_v_head",
        },
        {"NUM_KV_HEADS": 2, "GROUP": 8, "HEAD_DIM": 256, "BLOCK_SIZE": 64, "K_FORMAT": "bf16", "V_FORMAT": "bf16"}
        | {"IN_PARTS": in_parts, "MIN_PART": 512, "MIN_SPLIT": 128},
    )
    # On Hopper two registers once after the loops; 255 are all there are.
    assert found.spilled_bytes <= (16 if capability == 90 else 0)
    assert found.shared_bytes <= (CONSUMER_SHARED_BYTES if capability == 80 else SHARED_BYTES[capability])
    assert found.instructions[unit] > 0
    assert unit == "HMMA" or "HMMA" not in found.instructions


@pytest.mark.parametrize("swiglu", [True, False])
@pytest.mark.parametrize("block_m", [16, 64, 128])
@every_card
def test_experts_fit_a_consumer_cards_memory(block_m: int, capability: int, swiglu: bool) -> None:
    """The 35B-A3B's: hidden 2048, width 512, 8 of 256."""
    grouped = block_m > 16
    found = compiled(
        "moe:_experts_kernel",
        capability,
        _DEFAULTS[block_m][0 if swiglu else 1],
        {
            "*bf16:16": "x_ptr matrix_ptr out_ptr",
            "*i64:16": "chosen_ptr" if grouped else "chosen_ptr pairs_ptr tiles_ptr",
            "*i32:16": "pairs_ptr tiles_ptr" if grouped else "",
            "i32:16": "stride_x stride_expert stride_row",
            "i32": "stride_token stride_choice num_tokens",
        },
        ({"DEPTH": 2048, "WIDTH": 512} if swiglu else {"DEPTH": 512, "WIDTH": 2048})
        | {"SWIGLU": swiglu, "TOP_K": 8, "TOP_K_PADDED": 8, "GROUPED": grouped, "PRECISION": "tf32"}
        | {"BLOCK_M": block_m},
    )
    assert found.spilled_bytes == 0
    assert found.shared_bytes <= CONSUMER_SHARED_BYTES
    # Weights come to shared memory while the last ones are worked on.
    assert found.instructions.get("LDGSTS", 0) > 0
    if capability < 100:
        assert found.instructions.get("HGMMA" if capability == 90 and grouped else "HMMA", 0) > 0


_FP8_UNITS = pytest.mark.parametrize(("capability", "unit"), [(89, "QMMA"), (90, "QGMMA"), (100, "UTCQMMA")])


@_FP8_UNITS
@pytest.mark.parametrize("rows_of_scale", [1, 128])
@pytest.mark.parametrize("block_m", [64, 128])
def test_products_of_eight_bit_floats_use_a_cards_matrix_units(
    block_m: int, rows_of_scale: int, capability: int, unit: str
) -> None:
    found = compiled(
        "fp8:_tiles_kernel",
        capability,
        fp8.with_scales(fp8._TILES[block_m], rows_of_scale),
        {
            "*fp8e4nv:16": "codes_ptr values_ptr",
            "*fp32:16": "code_scales_ptr scales_ptr",
            "*bf16:16": "out_ptr",
            "i32": "num_rows stride_scale stride_group",
            "i32:16": "stride_values stride_out",
        },
        {"WIDTH": 4096, "DEPTH": 4096, "ROWS_OF_SCALE": rows_of_scale, "GROUP": 128, "PRECISION": "tf32"}
        | {"BLOCK_M": block_m},
    )
    _eight_bit_floats_are_multiplied(found, unit)
    # Scales of rows, two or four, and of blocks. Before Hopper a warp has more rows.
    loads = sum(count for word, count in found.in_loop.items() if word.startswith("LDG."))
    assert loads <= 4 or rows_of_scale == 1 or capability < 90


def _eight_bit_floats_are_multiplied(found: Compiled, unit: str) -> None:
    # Six registers of Ada's largest tile.
    assert found.spilled_bytes <= (24 if unit == "QMMA" else 0)
    assert found.shared_bytes <= CONSUMER_SHARED_BYTES
    assert found.instructions[unit] > 0
    assert "HMMA" not in found.instructions
    assert found.instructions["LDGSTS"] > 0


@_FP8_UNITS
@pytest.mark.parametrize("swiglu", [True, False])
@pytest.mark.parametrize("rows_of_scale", [1, 128])
@pytest.mark.parametrize("block_m", [16, 64, 128])
def test_experts_of_eight_bit_floats_use_a_cards_matrix_units(
    block_m: int, rows_of_scale: int, swiglu: bool, capability: int, unit: str
) -> None:
    """The 35B-A3B's: hidden 2048, width 512, 8 of 256. Also with 16 rows nothing is made a larger float first."""
    grouped = block_m > 16
    found = compiled(
        "moe_fp8:_fp8_experts_kernel",
        capability,
        fp8.with_scales(moe_fp8._DEFAULTS[block_m], rows_of_scale),
        {
            "*fp8e4nv:16": "codes_ptr values_ptr",
            "*fp32:16": "code_scales_ptr scales_ptr",
            "*bf16:16": "out_ptr",
            "*i64:16": "chosen_ptr" if grouped else "chosen_ptr pairs_ptr tiles_ptr",
            "*i32:16": "pairs_ptr tiles_ptr" if grouped else "",
            "i32:16": "stride_expert stride_row",
            "i32": "stride_scale_expert stride_scale stride_group stride_token stride_choice num_tokens",
        },
        ({"DEPTH": 2048, "WIDTH": 512} if swiglu else {"DEPTH": 512, "WIDTH": 2048})
        | {"ROWS_OF_SCALE": rows_of_scale, "GROUP": 128, "SWIGLU": swiglu, "TOP_K": 8, "TOP_K_PADDED": 8}
        | {"GROUPED": grouped, "PRECISION": "tf32", "BLOCK_M": block_m},
    )
    _eight_bit_floats_are_multiplied(found, unit)


_INTEGER_TYPES = {
    "*bf16:16": "x_ptr out_ptr",
    "*i32:16": "words_ptr",
    "*fp32:16": "scales_ptr minima_ptr",
    "i32:16": "stride_words stride_scale",
}
_INTEGER_FORMATS = ((8, 32, False), (4, 32, False), (4, 128, True), (4, 16, True))


def _integer_constants(kind: tuple[int, int, bool]) -> dict[str, Any]:
    bits, width, has_minima = kind
    bias = 128 if bits == 8 else 0 if has_minima else 8
    return {
        "WIDTH": 4096,
        "DEPTH": 4096,
        "BITS": bits,
        "GROUP": width,
        "HAS_MINIMA": has_minima,
        "BIAS": bias,
    }


@pytest.mark.parametrize("kind", _INTEGER_FORMATS)
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_integers_become_floats_in_registers(kind: tuple[int, int, bool], capability: int) -> None:
    bits, width, has_minima = kind
    parts = 2 if width == 16 else 1
    constants = _integer_constants(kind) | {"PARTS": parts}
    found = compiled("integers:_vector_kernel", capability, integers._VECTOR[4], _INTEGER_TYPES, constants)
    assert found.spilled_bytes == 0
    assert found.num_registers <= TWO_PROGRAMS
    # 16 bytes of words for each of four columns; x by four numbers; nothing of it through shared memory.
    assert found.instructions["LDG"] <= 4 + 32 // bits + 4 * parts * (1 + has_minima) + 4 * has_minima
    assert found.instructions["BAR"] <= 8
    # A conversion takes a quarter of an addition's rate or less.
    assert "I2F" not in found.instructions
    assert "I2FP" not in found.instructions


@pytest.mark.parametrize("kind", _INTEGER_FORMATS)
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("form", [16, 64])
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_tiles_of_integers_use_a_cards_matrix_units(
    form: int, is_wide: bool, kind: tuple[int, int, bool], capability: int
) -> None:
    """Those of few columns in parts of their sums."""
    config = integers._TILES[form][is_wide]
    span = 4096 if is_wide else integers.columns_of_a_part(4096, 4096)
    found = compiled(
        "integers:_tiles_kernel",
        capability,
        config,
        {
            "*bf16:16": "x_ptr" + is_wide * " out_ptr",
            "*i32:16": "words_ptr",
            "*fp32:16": "scales_ptr minima_ptr" + (not is_wide) * " out_ptr",
            "i32": "num_rows",
            "i32:16": "stride_words stride_scale stride_x stride_out",
        },
        _integer_constants(kind)
        | {"SHARED": min(kind[1], config.blocks["BLOCK_K"]), "SPAN": span, "BLOCK_M": form, "PRECISION": "tf32"},
    )
    # Two registers of one form on Blackwell.
    assert found.spilled_bytes <= (8 if capability == 100 else 0)
    _weights_go_from_registers_into_products(found, capability)
    # Scales, too, come while the last ones are worked on.
    assert not [word for word in found.in_loop if word.startswith("LDG.")]


def _weights_go_from_registers_into_products(found: Compiled, capability: int, num_scales: int = 0) -> None:
    """On Hopper nothing of them is stored to shared memory, elsewhere nothing by two bytes or one.

    num_scales: stores of scales, where a tile has too few of them to be copied ahead.
    """
    assert found.shared_bytes <= CONSUMER_SHARED_BYTES
    unit = "HMMA" if capability < 90 else "HGMMA" if capability == 90 else "UTCHMMA"
    assert found.instructions[unit] > 0
    # Rows and words come to shared memory while the last ones are worked on.
    assert found.instructions["LDGSTS"] > 0
    stores = sum(count for word, count in found.in_loop.items() if word.startswith("STS"))
    narrow = sum(count for word, count in found.in_loop.items() if re.match(r"STS\.[US](8|16)", word))
    barriers = sum(count for word, count in found.in_loop.items() if word.startswith("BAR."))
    if capability == 90:
        assert stores <= num_scales
        assert barriers <= 2 + num_scales
    assert narrow <= num_scales


@pytest.mark.parametrize("swiglu", [True, False])
@pytest.mark.parametrize("block_m", [16, 64, 128])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_experts_of_integers_use_a_cards_matrix_units(capability: int, bits: int, block_m: int, swiglu: bool) -> None:
    """The 35B-A3B's, with the shared one: hidden 2048, width 512, 9 of 257."""
    grouped, config = block_m > 16, moe_integers._DEFAULTS[block_m]
    found = compiled(
        "moe_integers:_integer_experts_kernel",
        capability,
        config,
        {
            "*bf16:16": "x_ptr scales_ptr minima_ptr out_ptr",
            "*i64:16": "chosen_ptr" if grouped else "chosen_ptr pairs_ptr tiles_ptr",
            "*i32:16": "words_ptr" + (" pairs_ptr tiles_ptr" if grouped else ""),
            "i32:16": "stride_x stride_word_expert stride_word_row stride_scale_expert stride_scale_row",
            "i32": "stride_token stride_choice num_tokens",
        },
        ({"DEPTH": 2048, "WIDTH": 512} if swiglu else {"DEPTH": 512, "WIDTH": 2048})
        | {"BITS": bits, "GROUP": 32, "HAS_MINIMA": False, "BIAS": 128 if bits == 8 else 8, "SHARED": 32}
        | {"SWIGLU": swiglu, "TOP_K": 9, "TOP_K_PADDED": 16, "GROUPED": grouped, "PRECISION": "tf32"}
        | {"BLOCK_M": block_m},
    )
    assert found.spilled_bytes == 0
    _weights_go_from_registers_into_products(found, capability, num_scales=int(block_m == 128))


@pytest.mark.parametrize("kind", _INTEGER_FORMATS)
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_a_matrix_is_made_of_integers_and_stored_by_16_bytes(kind: tuple[int, int, bool], capability: int) -> None:
    config = integers._UNPACKED
    types = _INTEGER_TYPES | {"*bf16:16": "matrix_ptr"}
    found = compiled(
        "integers:_unpacked_kernel",
        capability,
        config,
        types,
        _integer_constants(kind) | {"SHARED": min(kind[1], config.blocks["BLOCK_K"])},
    )
    assert found.spilled_bytes == 0
    assert found.num_registers <= 64
    tile = config.blocks["BLOCK_N"] * config.blocks["BLOCK_K"]
    assert found.instructions["STG"] == tile // (32 * config.num_warps) // 8
