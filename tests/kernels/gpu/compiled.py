"""Compiles a kernel for cards that aren't there: Triton and ptxas need no GPU for that.

Says what an interpreter can't: that the kernel compiles, how much shared memory it takes and how many registers, and
which matrix instructions it uses. Runs as a child, because here kernels are interpreted.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
# What a program may take on the least cards of a compute capability.
SHARED_BYTES = {80: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}


@dataclass(frozen=True)
class Variant:
    """A kernel as it is launched.

    Attributes:
        kernel: `module:function`, such as "qwen35mm_kernels.gpu.norms:_rms_norm_kernel".
        signature: each run-time argument's Triton type: "*bf16", "*fp32", "*i32", "i32", "fp32", ...; pointers and
            integers that end in ":16" are known to be divisible by 16, as torch's tensors and most strides are.
        constants: each constexpr argument's value.
    """

    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Compiled:
    """A kernel for one compute capability.

    Attributes:
        num_registers: of one thread.
        spilled_bytes: of one thread, to local memory.
        shared_bytes: of one program.
        instructions: how often each machine instruction occurs, by its first word (HGMMA, LDGSTS, ...).
        before_wait: the same, before the kernel waits for the one before it; empty if it never does.
        in_loop: the same inside the longest loop, by all words (STS.U16, BAR.SYNC.DEFER_BLOCKING, ...).
        repeated: how often each product is computed, 1 where every warp has a part of its own; none for those that one
            thread issues for all (Blackwell).
    """

    num_registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: Mapping[str, int]
    before_wait: Mapping[str, int]
    in_loop: Mapping[str, int]
    repeated: Sequence[int]


def compile_variants(variants: Sequence[Variant], capability: int) -> list[Compiled]:
    """Compiles variants for 80, 89, 90 or 100 one after the other, in one child; fails with all that do not compile."""
    answers = run_child(__file__, {"capability": capability, "variants": [asdict(variant) for variant in variants]})
    failures = [answer for answer in answers if isinstance(answer, str)]
    assert not failures, "\n\n".join(failures)
    return [Compiled(**answer) for answer in answers]


def run_child(script: str, task: Any) -> Any:
    """Runs a file of this folder with Triton's compiler in place of its interpreter: JSON in, JSON out."""
    # What is inherited comes last, so that another Triton than the installed one can be named there.
    path = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "preprocess"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    done = subprocess.run(
        [sys.executable, script], input=json.dumps(task), capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _compile(variant: Variant, capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = variant.kernel.split(":")
    function = getattr(importlib.import_module(module), name)
    types = {name: kind.removesuffix(":16") for name, kind in variant.signature.items()}
    names = list(function.arg_names)
    divisible = [["tt.divisibility", 16]]
    attributes = {(names.index(name),): divisible for name, kind in variant.signature.items() if kind.endswith(":16")}
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(fn=function, signature=signature, constexprs=dict(variant.constants), attrs=attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", str(cubin))
        machine_code = _tool("nvdisasm", "-c", str(cubin))
    registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))  # type: ignore[index]
    counts = dict(Counter(word.partition(".")[0] for word in _words(machine_code)))
    before, wait, _ = machine_code.partition("ACQBULK")
    before_wait = dict(Counter(word.partition(".")[0] for word in _words(before))) if wait else {}
    in_loop = dict(Counter(_words(_longest_loop(machine_code))))
    repeated = _repeated(compiled.asm["ttgir"])
    return Compiled(registers, stack, compiled.metadata.shared, counts, before_wait, in_loop, repeated)


def _words(machine_code: str) -> list[str]:
    """Each instruction's name."""
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)", machine_code, re.MULTILINE)


def _longest_loop(machine_code: str) -> str:
    """What lies between a jump back and its target, the most of all; empty without a loop."""
    places = {label[1]: label.start() for label in re.finditer(r"^(\.L_x_\d+):", machine_code, re.MULTILINE)}
    jumps = re.finditer(r"\bBRA[^\n]*`\((\.L_x_\d+)\)", machine_code)
    loops = [machine_code[places[jump[1]] : jump.end()] for jump in jumps if places[jump[1]] < jump.start()]
    # A kernel's last jump is to itself.
    return max(loops, key=len, default="")


def _repeated(ttgir: str) -> list[int]:
    """For each product of matrices, the warps' tiles over the product's own size."""
    layouts = {
        name: [[int(number) for number in numbers.split(",")] for numbers in (warps, tile)]
        for name, warps, tile in re.findall(
            r"(#\w+) = #ttg\.nvidia_mma<\{.*?warpsPerCTA = \[([\d, ]+)\], instrShape = \[([\d, ]+)\]\}>", ttgir
        )
    }
    found = []
    for shape, name in re.findall(r"= (?:tt\.dot|ttng\.warp_group_dot) .* -> tensor<([\dx]+)xf32, (#\w+)>", ttgir):
        warps, tile = layouts[name]
        sizes = [int(size) for size in shape.split("x")]
        covered = [count * extent for count, extent in zip(warps, tile, strict=False)]
        found.append(math.prod(-(-extent // size) for extent, size in zip(covered, sizes, strict=True)))
    return found


def _answer(variant: Variant, capability: int) -> dict[str, Any] | str:
    try:
        return asdict(_compile(variant, capability))
    except Exception as error:
        return f"{variant.kernel} for {capability}: {type(error).__name__}: {error}\n{variant}"


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    task = json.load(sys.stdin)
    print(json.dumps([_answer(Variant(**variant), task["capability"]) for variant in task["variants"]]))
