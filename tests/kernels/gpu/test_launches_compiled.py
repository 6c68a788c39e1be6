"""Everything that the engine launches at the family's real sizes compiles, and nothing is launched that is unknown."""

from __future__ import annotations

import ast
import functools

import pytest

pytest.importorskip("triton", reason="Triton has no package for this platform")

from tests.kernels.gpu.compiled import ROOT, Variant, compile_variants
from tests.kernels.gpu.launches import SHARED_BYTES, launched, launched_otherwise

GPU = ROOT / "kernels" / "qwen35mm_kernels" / "gpu"
MODELS = [
    ("0.8B", "bfloat16"),
    ("9B", "bfloat16"),
    ("27B", "bfloat16"),
    ("35B-A3B", "bfloat16"),
    ("0.8B", "float32"),
    ("35B-A3B", "float32"),
]
# In bfloat16 these hold what they work on in registers, up to a few that one version or another lacks.
IN_REGISTERS = (
    "_decode_splits_kernel",
    "_experts_kernel",
    "_gdn_decode_step_kernel",
    "_prefill_kernel",
    "_prepare_kernel",
    "_scan_kernel",
)
# This one only runs where sequences are cut, which takes fewer heads than any of the family has.
NOT_LAUNCHED = {"qwen35mm_kernels.gpu.gdn_segments:_combine_kernel"}
# All code paths: single tokens, less than a chunk, and the three sizes of an expert's tile.
LENGTHS = (1, 100, 2048, 4096)
BATCHES = (1, 3, 4, 32)


@functools.cache
def engine_variants(size: str, dtype: str, capability: int) -> list[Variant]:
    return unique(launched(size, lengths=LENGTHS, batches=BATCHES, dtype=dtype, capability=capability))


@functools.cache
def other_variants(dtype: str, capability: int) -> list[Variant]:
    return unique(launched_otherwise(dtype=dtype, capability=capability))


def unique(found: dict[str, list[Variant]]) -> list[Variant]:
    return list({repr(variant): variant for variants in found.values() for variant in variants}.values())


def kernels_of_the_package() -> set[str]:
    """`module:function` of every kernel that some call of `launch` names."""
    found = set()
    for path in GPU.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "launch":
                kernel = node.args[0]
                assert isinstance(kernel, ast.Name)
                found.add(f"qwen35mm_kernels.gpu.{path.stem}:{kernel.id}")
    return found


def test_every_kernel_is_launched_by_the_engine() -> None:
    by_the_engine = {variant.kernel for variant in engine_variants("35B-A3B", "bfloat16", 90)}
    assert by_the_engine == kernels_of_the_package() - NOT_LAUNCHED
    assert {variant.kernel for variant in other_variants("bfloat16", 90)} > NOT_LAUNCHED


def check(variants: list[Variant], capability: int) -> None:
    for variant, compiled in zip(variants, compile_variants(variants, capability), strict=True):
        assert compiled.shared_bytes <= SHARED_BYTES[capability], variant
        if variant.kernel.endswith(IN_REGISTERS) and "*bf16:16" in variant.signature.values():
            assert compiled.spilled_bytes <= 16, variant


def test_a_decode_step_of_the_smallest_model_compiles() -> None:
    step = ("_gdn_decode_step_kernel", "_decode_splits_kernel", "_combine_splits_kernel", "_qk_norm_rope_write_kernel")
    variants = [variant for variant in engine_variants("0.8B", "bfloat16", 90) if variant.kernel.endswith(step)]
    check(variants, 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("size", "dtype"), MODELS)
def test_everything_that_the_engine_launches_compiles(size: str, dtype: str, capability: int) -> None:
    check(engine_variants(size, dtype, capability), capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_everything_else_compiles(dtype: str, capability: int) -> None:
    check(other_variants(dtype, capability), capability)
