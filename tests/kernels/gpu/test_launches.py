"""What the engine launches at the family's real sizes: known kernels, the same for every length and batch, all compile.

Nothing that is launched waits: on meta tensors that is an error.
"""

from __future__ import annotations

import ast
import functools

import pytest

pytest.importorskip("triton", reason="Triton has no package for this platform")

from tests.kernels.gpu.compiled import ROOT, SHARED_BYTES, Variant, compile_variants
from tests.kernels.gpu.launches import launched

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
    "_tiles_kernel",
    "_vectors_kernel",
    "_gdn_decode_step_kernel",
    "_prefill_kernel",
    "_prepare_kernel",
    "_scan_kernel",
)


@functools.cache
def similar(size: str) -> dict[str, list[Variant]]:
    """Lengths for which an expert's tiles have the same number of rows, and batches."""
    return launched(size, lengths=[2048, 2049, 2100], batches=[1, 2, 3, 8])


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
    by_the_engine = {variant.kernel for variants in similar("35B-A3B").values() for variant in variants}
    assert by_the_engine == kernels_of_the_package()


@pytest.mark.parametrize("size", [pytest.param("0.8B", marks=pytest.mark.slow), "35B-A3B"])
def test_no_length_and_no_batch_is_compiled_for_by_itself(size: str) -> None:
    """A compiler that runs in the middle of a chat is seconds of silence; and other code may round otherwise."""
    for kind in ("prefill", "step"):
        first, *others = (variants for name, variants in similar(size).items() if name.startswith(kind))
        assert len(first) >= 9
        for variants in others:
            assert variants == first


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("size", "dtype"), MODELS)
def test_everything_that_the_engine_launches_compiles(size: str, dtype: str, capability: int) -> None:
    """On all code paths: single tokens, less than a chunk, and the three sizes of an expert's tile."""
    found = launched(size, lengths=(1, 100, 2048, 4096), batches=(1, 3, 4, 32), dtype=dtype, capability=capability)
    variants = list({repr(variant): variant for variants in found.values() for variant in variants}.values())
    for variant, compiled in zip(variants, compile_variants(variants, capability), strict=True):
        assert compiled.shared_bytes <= SHARED_BYTES[capability], variant
        if variant.kernel.endswith(IN_REGISTERS) and "*bf16:16" in variant.signature.values():
            assert compiled.spilled_bytes <= 16, variant
