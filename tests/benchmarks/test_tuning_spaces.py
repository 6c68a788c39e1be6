"""What the tuner tries: every kernel that asks for a configuration, legal cuts of it, and right results from each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

import qwen35mm_kernels
from benchmarks.kernel_cases import SHAPES, Case, Cases, Shapes
from benchmarks.tune_kernels import asked_by
from benchmarks.tuning import Checked
from benchmarks.tuning_spaces import OPERATIONS, SPACES, sizes_of, workloads_of
from qwen35mm_kernels import gpu
from qwen35mm_kernels.gpu.launch import trial
from qwen35mm_kernels.gpu.tables import Table

GPU = Path(qwen35mm_kernels.__file__).parent / "gpu"
# Few heads and tokens, but heads and states of the real sizes: the blocks are cut from those.
SMALL = Shapes("small", 320, 2, 1, 2, vision_heads=2, k_heads=1, experts=(2, 2, 64), vocab=9000)
SMALL_SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "gated_delta_prefill": ((70,),),
    "gdn_decode_step": ((2,),),
    "paged_attention_decode": ((2, 320),),
    "paged_attention_prefill": ((70, 128),),
    "moe_experts": ((3,), (5,), (97,)),
    "fp8_linear": ((2,), (5,)),
    "integer_linear": ((1, 4), (5, 4)),
    "norm_linear": ((1,), (3,)),
    "sample": ((4,),),
}
# The others take 3 to 25 s each, interpreted.
QUICK = {"rms_norm", "gated_rms_norm", "apply_partial_rope", "mrope_cos_sin"}


def kernels_in_sources() -> set[str]:
    """The names that are passed to `config_for`, or to `norm._config`, which passes them on."""
    found = set()
    for path in GPU.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="config_for" | "_config"), args=[ast.Constant(value=name), *_]):
                    found.add(name)
    return found


def test_every_kernel_that_asks_for_a_configuration_has_a_space_and_a_workload() -> None:
    assert set(SPACES) == kernels_in_sources()
    assert {kernel for operation in OPERATIONS.values() for kernel in operation.kernels} == set(SPACES)


def test_sizes_are_read_from_the_name_of_a_shape() -> None:
    assert sizes_of("Hk16_Hv32_K128_16") == {"Hk": 16, "Hv": 32, "K": 128}
    assert sizes_of("V248320") == {"V": 248_320}


@torch.inference_mode()
def test_candidates_are_few_and_fit_the_real_shapes() -> None:
    asked: Table = {}
    for kernel in SPACES:
        for workload in workloads_of(kernel, list(SHAPES.values())):
            of_one = asked_by(workload, {}, "meta")
            assert {name for name, _ in of_one} <= set(OPERATIONS[workload.operation].kernels)
            asked |= of_one
    assert {kernel for kernel, _ in asked} == set(SPACES)
    for (kernel, shape), default in asked.items():
        candidates = SPACES[kernel].candidates(shape, default)
        assert 1 <= len(candidates) <= 12, (kernel, shape)
        texts = {repr(config) for config in candidates}
        assert len(texts) == len(candidates)
        assert repr(default) not in texts
        for config in candidates:
            assert config.blocks.keys() == default.blocks.keys()
            assert config.num_warps in {1, 2, 4, 8, 16}


def small_cases(kernel: str) -> Iterator[Case]:
    made = Cases(SMALL, "cpu")
    for name, operation in OPERATIONS.items():
        if kernel in operation.kernels:
            for size in SMALL_SIZES.get(name, ((5,),)):
                yield getattr(made, name)(*size)


@pytest.mark.parametrize(
    "kernel", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SPACES]
)
@torch.inference_mode()
def test_every_cut_gives_the_right_result(kernel: str) -> None:
    """Interpreted: warps and stages make no difference here, blocks do."""
    torch.manual_seed(0)
    cuts = set()
    for case in small_cases(kernel):
        checked = Checked(case, {})
        with trial({}, lambda *arguments, **constants: None) as asked:
            case.run(gpu)
        for (name, shape), default in asked.items():
            for config in SPACES[kernel].candidates(shape, default) if name == kernel else ():
                cut = (shape, *config.blocks.values())
                if cut not in cuts:
                    cuts.add(cut)
                    checked.check({(kernel, shape): config})
    assert len(cuts) > 1
