"""What the engine launches at the family's real sizes: known kernels, the same for every length and batch, all compile.

Nothing that is launched waits: on meta tensors that is an error.
"""

from __future__ import annotations

import ast
import functools

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

from qwen35mm_kernels.gpu import early
from qwen35mm_kernels.gpu.launch import Config, launch, trial
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
    "_vector_kernel",
    "_vectors_kernel",
    "_gdn_decode_step_kernel",
    "_norm_linear_kernel",
    "_prefill_kernel",
    "_prepare_kernel",
    "_scan_kernel",
)
# A dense model's decode step, without what comes once in it.
STEP = (
    "_combine_splits_kernel",
    "_decode_splits_kernel",
    "_gdn_decode_step_kernel",
    "_norm_linear_kernel",
    "_qk_norm_rope_write_kernel",
    "_rms_norm_kernel",
    "_swiglu_kernel",
)


@functools.cache
def similar(size: str) -> dict[str, list[Variant]]:
    """Lengths for which an expert's tiles have the same number of rows, and batches: up to four rows are two forms."""
    return launched(size, lengths=[2048, 2049, 2100], batches=[1, 2, 3, 4, 8, 9])


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


def test_a_warm_turn_is_cut_into_parts_and_launches_nothing_else_anew() -> None:
    found = similar("35B-A3B")
    variants = [variant for variant in found["turn"] if variant not in found["prefill 2048"]]
    attention = [variant for variant in variants if "attention" in variant.kernel]
    assert [variant.kernel.split(":")[1] for variant in attention] == ["_combine_splits_kernel", "_prefill_kernel"]
    assert attention[1].constants["IN_PARTS"]
    assert attention[0] in found["step 1"], "the same one as decode's"


def test_every_kernel_is_launched_by_the_engine() -> None:
    by_the_engine = {variant.kernel for variants in similar("35B-A3B").values() for variant in variants}
    assert by_the_engine == kernels_of_the_package()


@pytest.mark.parametrize("size", [pytest.param("0.8B", marks=pytest.mark.emulated), "35B-A3B"])
def test_no_length_and_no_batch_is_compiled_for_by_itself(size: str) -> None:
    """A compiler that runs in the middle of a chat is seconds of silence; and other code may round otherwise."""
    for names in (
        ["prefill 2048", "prefill 2049", "prefill 2100"],
        ["step 2", "step 3", "step 4"],
        ["step 8", "step 9"],
    ):
        first, *others = (similar(size)[name] for name in names)
        assert len(first) >= 9
        for variants in others:
            assert variants == first


def test_a_steps_kernels_start_before_the_last_one_has_ended() -> None:
    """Besides the experts', and what comes once a step: positions and sampling."""
    variants = [variant for found in similar("35B-A3B").values() for variant in found if "EARLY" in variant.constants]
    assert {variant.kernel.split(":")[1] for variant in variants} == set(STEP)
    assert all(variant.constants["EARLY"] for variant in variants)


def test_no_card_before_hopper_starts_a_kernel_early(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = torch.device("cpu"), []
    assert not early.starts_early(device), "interpreted"
    monkeypatch.setattr(early, "_IS_INTERPRETED", False)
    for capability, expected in ((80, False), (89, False), (90, True), (100, True), (120, True)):
        monkeypatch.setattr(early, "capability", lambda device, found=capability: found)
        assert early.starts_early(device) == expected
    with trial({}, lambda kernel, grid, *args, **named: asked.append(named.get("launch_pdl"))):
        for starts in (True, False):
            launch(None, (1,), torch.zeros(1), config=Config(), EARLY=starts)
        launch(None, (1,), torch.zeros(1), config=Config())
    assert asked == [True, None, None]


def test_a_kernel_that_starts_early_waits_before_it_writes_or_ends() -> None:
    """In every function that is given EARLY, a wait comes before all stores and before every return."""
    checked = set()
    for path in GPU.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(function, ast.FunctionDef) or function.name == "wait_for_inputs":
                continue
            if "EARLY" not in [arg.arg for arg in function.args.args]:
                continue
            nodes = list(ast.walk(function))
            calls = {ast.unparse(node.func): node.lineno for node in reversed(nodes) if isinstance(node, ast.Call)}
            stores = [line for name, line in calls.items() if "store" in name or name == "_shift"]
            assert calls["wait_for_inputs"] < min(stores, default=function.end_lineno or 0), function.name
            for block in (node.body for node in nodes if isinstance(node, ast.If | ast.For | ast.While)):
                returns = [node.lineno for node in block if isinstance(node, ast.Return)]
                before = [node for node in (*function.body, *block) if returns and node.lineno < returns[0]]
                assert not returns or "wait_for_inputs(EARLY)" in map(ast.unparse, before), function.name
            checked.add(function.name)
    assert checked >= set(STEP)


@pytest.mark.emulated
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("size", "dtype"), MODELS)
def test_everything_that_the_engine_launches_compiles(size: str, dtype: str, capability: int) -> None:
    """On all code paths: single tokens, less than a chunk, and the three sizes of an expert's tile."""
    found = launched(size, lengths=(1, 100, 2048, 4096), batches=(1, 3, 4, 32), dtype=dtype, capability=capability)
    variants = list({repr(variant): variant for variants in found.values() for variant in variants}.values())
    for variant, compiled in zip(variants, compile_variants(variants, capability), strict=True):
        assert compiled.shared_bytes <= SHARED_BYTES[capability], variant
        if variant.kernel.endswith(IN_REGISTERS) and "*bf16:16" in variant.signature.values():
            # See `test_gdn_scan` and `test_weights_of_a_product_of_few_rows_are_asked_for_early`.
            before_hopper = {"_scan_kernel": 88, "_norm_linear_kernel": 32} if capability < 90 else {}
            assert compiled.spilled_bytes <= before_hopper.get(variant.kernel.split(":")[1], 16), variant


@pytest.mark.emulated
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
@pytest.mark.parametrize(
    ("kv_dtype", "dtype"),
    [
        ("k=int8,v=int4", "bfloat16"),
        ("k=int4,v=fp8", "bfloat16"),
        ("k=fp8,v=fp8_e5m2", "bfloat16"),
        ("k=fp8_e5m2,v=int8", "bfloat16"),
        ("k=f16,v=int4", "bfloat16"),
        ("float32", "bfloat16"),
        ("k=int8,v=fp8", "float32"),
        ("k=bf16,v=int4", "float32"),
    ],
)
def test_keys_and_values_of_every_type_compile(kv_dtype: str, dtype: str, capability: int) -> None:
    """Heads of 256 dimensions. Four registers may spill, and ten in prefill on Blackwell."""
    found = launched("9B", lengths=(100,), batches=(4,), dtype=dtype, kv_dtype=kv_dtype, capability=capability)
    names = "_qk_norm_rope_write_kernel", "_decode_splits_kernel", "_prefill_kernel"
    variants = list({repr(v): v for variants in found.values() for v in variants if v.kernel.endswith(names)}.values())
    assert len(variants) == len(names)
    for variant, compiled in zip(variants, compile_variants(variants, capability), strict=True):
        assert compiled.shared_bytes <= SHARED_BYTES[capability], variant
        if dtype == "bfloat16":
            is_blackwells = capability == 100 and variant.kernel.endswith("_prefill_kernel")
            assert compiled.spilled_bytes <= (40 if is_blackwells else 16), variant
            if variant.kernel.endswith("_decode_splits_kernel"):
                assert compiled.num_registers <= 168, variant
