"""Compiles a kernel for cards that aren't there: Triton and ptxas need no GPU for that.

Says what an interpreter can't: that the kernel compiles, how much shared memory it takes and how many registers, and
which matrix instructions it uses. Runs as a child, because here kernels are interpreted.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Compiled:
    """A kernel for one compute capability.

    Attributes:
        num_registers: of one thread.
        spilled_bytes: of one thread, to local memory.
        shared_bytes: of one program.
        instructions: how often each machine instruction occurs, by its first word (HGMMA, LDGSTS, ...).
    """

    num_registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: dict[str, int]


def compile_kernel(
    kernel: str,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    capability: int = 90,
    num_warps: int = 4,
    num_stages: int = 2,
) -> Compiled:
    """Compiles `module:function`.

    Args:
        kernel: such as "qwen35mm_kernels.gpu.norms:_rms_norm_kernel".
        signature: each run-time argument's Triton type: "*bf16", "*fp32", "*i32", "i32", "fp32", ...; pointers and
            integers that end in ":16" are known to be divisible by 16, as torch's tensors and most strides are.
        constants: each constexpr argument's value.
        capability: 80, 90, 100, ...
    """
    task = {
        "kernel": kernel,
        "signature": signature,
        "constants": constants,
        "capability": capability,
        "options": {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True},
    }
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path, "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(task), capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Compiled(**json.loads(done.stdout.splitlines()[-1]))


def _compile(task: dict[str, Any]) -> Compiled:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = task["kernel"].split(":")
    function = getattr(importlib.import_module(module), name)
    types = {name: kind.removesuffix(":16") for name, kind in task["signature"].items()}
    names = list(function.arg_names)
    divisible = [["tt.divisibility", 16]]
    attributes = {(names.index(name),): divisible for name, kind in task["signature"].items() if kind.endswith(":16")}
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(fn=function, signature=signature, constexprs=task["constants"], attrs=attributes)
    target = GPUTarget("cuda", task["capability"], 32)
    compiled = triton.compile(source, target=target, options=task["options"])
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", str(cubin))
        machine_code = _tool("nvdisasm", "-c", str(cubin))
    registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))  # type: ignore[index]
    counts: dict[str, int] = {}
    for word in re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9]+)", machine_code, re.MULTILINE):
        counts[word] = counts.get(word, 0) + 1
    return Compiled(registers, stack, compiled.metadata.shared, counts)


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    print(json.dumps(asdict(_compile(json.load(sys.stdin)))))
