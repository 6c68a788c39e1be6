"""Makes others.safetensors: matrices as AutoGPTQ, AutoAWQ and bitsandbytes write them, and what they read in them.

None of them installs beside this project's PyTorch, and their releases are final, so their files are kept:

    pip download --no-deps --no-binary=autoawq auto-gptq==0.7.1 autoawq==0.2.9 bitsandbytes==0.50.2 -d others
    (cd others && tar xzf autoawq-0.2.9.tar.gz && unzip -q 'auto_gptq*.whl' && unzip -q 'bitsandbytes*.whl')
    python -m tests.checkpoints.others others

Names are `<case>/<part>`; `<case>/expected` are the numbers, float32. Made with PyTorch 2.13 on a CPU.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FILE = Path(__file__).with_suffix(".safetensors")
OUT, WIDTH, GROUP = 32, 96, 32

Tensors = dict[str, torch.Tensor]


def main(folder: Path) -> None:
    torch.manual_seed(0)
    found: dict[str, Tensors] = {}
    _pretend(folder, "auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    for bits in (2, 3, 4, 8):
        found[f"gptq-{bits}-symmetric"] = gptq(bits, symmetric=True)
        found[f"gptq-{bits}"] = gptq(bits)
    found["gptq-4-one-group"] = gptq(4, group=WIDTH)
    found["gptq-4-order"] = gptq(4, in_order=False)
    _pretend(folder / "autoawq-0.2.9", "awq", "awq.utils", "awq.modules", "awq.modules.linear")
    sys.modules["awq.utils.module"] = _module("awq.utils.module", try_import=lambda _: (None, ""))
    sys.modules["awq.utils.utils"] = _module("awq.utils.utils", get_best_device=lambda: "cpu")
    found["awq"] = awq()
    sys.path.append(str(folder))
    for kind in ("nf4", "fp4"):
        found[f"bitsandbytes-{kind}"] = bitsandbytes4(kind, (OUT, 128), nested=False)
        found[f"bitsandbytes-{kind}-nested"] = bitsandbytes4(kind, (OUT, 128), nested=True)
    # Runs of 64 that go on in the next row. Its reader for CPUs gets those of a width like 96 wrong.
    found["bitsandbytes-nf4-odd"] = bitsandbytes4("nf4", (OUT, 100), nested=False)
    found["bitsandbytes-int8"] = bitsandbytes8()
    flat = {f"{case}/{part}": x.contiguous() for case, parts in found.items() for part, x in parts.items()}
    save_file(flat, FILE)


def _affine(
    bits: int, group_of: torch.Tensor, *, symmetric: bool
) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """A layer whose weights are whole numbers times scales, with scales and zero points [OUT, groups]."""
    linear = torch.nn.Linear(WIDTH, OUT, bias=False)
    weight, most = linear.weight.data, 2**bits - 1
    groups = int(group_of.max()) + 1
    scales, zeros = torch.empty(OUT, groups), torch.empty(OUT, groups)
    for group in range(groups):
        columns = weight[:, group_of == group]
        low, high = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
        if symmetric:
            scale, zero = 2 * torch.maximum(-low, high) / most, torch.full_like(low, (most + 1) / 2)
        else:
            scale = (high - low) / most
            zero = torch.round(-low / scale).clamp(min=1)
        scales[:, group], zeros[:, group] = scale.half().float(), zero
    scale, zero = scales[:, group_of], zeros[:, group_of]
    linear.weight.data = ((torch.round(weight / scale) + zero).clamp(0, most) - zero) * scale
    return linear, scales, zeros


def gptq(bits: int, *, group: int = GROUP, symmetric: bool = False, in_order: bool = True) -> Tensors:
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear  # pyright: ignore[reportMissingImports]

    group_of = torch.arange(WIDTH) // group
    group_of = group_of if in_order else group_of[torch.randperm(WIDTH)]
    linear, scales, zeros = _affine(bits, group_of, symmetric=symmetric)
    layer = QuantLinear(bits, group, WIDTH, OUT, False)
    layer.pack(linear, scales, zeros, group_of.to(torch.int32))
    with torch.no_grad():
        expected = layer(torch.eye(WIDTH)).t().float()
    assert torch.equal(expected, linear.weight.data)
    return {**layer.state_dict(), "expected": expected}


def awq() -> Tensors:
    from awq.modules.linear.gemm import WQLinear_GEMM  # pyright: ignore[reportMissingImports]

    linear, scales, zeros = _affine(4, torch.arange(WIDTH) // GROUP, symmetric=False)
    layer = WQLinear_GEMM.from_linear(linear, 4, GROUP, False, scales.t().contiguous(), zeros.t().contiguous())
    # Its own dequantise_gemm rounds to float16.
    return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales, "expected": linear.weight.data}


def bitsandbytes4(kind: str, shape: tuple[int, int], *, nested: bool) -> Tensors:
    import bitsandbytes as bnb  # pyright: ignore[reportMissingImports]

    weight = torch.randn(shape)
    made = bnb.nn.Params4bit(weight, False, quant_type=kind, compress_statistics=nested, blocksize=64)._quantize("cpu")
    parts = {name.replace(f".bitsandbytes__{kind}", ""): x for name, x in made.quant_state.as_dict(packed=True).items()}
    return {"codes": made.data, **parts, "expected": bnb.functional.dequantize_4bit(made.data, made.quant_state)}


def bitsandbytes8() -> Tensors:
    import bitsandbytes as bnb  # pyright: ignore[reportMissingImports]

    codes, largest, _ = bnb.functional.int8_vectorwise_quant(torch.randn(OUT, WIDTH).half())
    expected = bnb.functional.int8_vectorwise_dequant(codes, largest)
    return {"codes": codes, "SCB": largest, "expected": expected.float()}


def _pretend(folder: Path, *packages: str) -> None:
    """Packages without their own `__init__`, which import every model that they know."""
    for name in packages:
        sys.modules[name] = _module(name, __path__=[str(folder / name.replace(".", "/"))])


def _module(name: str, **values: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(values)
    return module


if __name__ == "__main__":
    main(Path(sys.argv[1]))
