"""Our GPU kernels, flash-linear-attention's, and what the card allows, in one run at the shapes of Qwen3.5.

    python benchmarks/kernels.py                       everything: some minutes on a card
    python benchmarks/kernels.py --only prefill --models 9B --lengths 4096,8192

Runs the kernels' tests first and reports nothing where one fails. A pair whose results differ isn't timed. The limit of
a case is the larger of its bytes over what a large copy moves here and its arithmetic over what a large matrix product
does here, both measured in the same run; bytes count every input read once and every output written once. Times are
the GPU's own; caches are cold: a buffer of their size is overwritten before each call. Decode steps are replayed from
CUDA graphs, as the engine does, ours and the peer's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "preprocess")]

import torch  # noqa: E402

from benchmarks.kernel_cases import SHAPES, Case, decode_cases, prefill_cases  # noqa: E402
from benchmarks.report import Spread, machine, print_json, print_machine, print_table  # noqa: E402

MAX_RELATIVE_ERROR = 1e-2
COPY_BYTES = 4 << 30
MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Ceilings:
    """What this card does at best.

    Attributes:
        bytes_per_s: of a large copy, reading and writing counted.
        flops_per_s: of a large bfloat16 matrix product.
    """

    bytes_per_s: float
    flops_per_s: float

    def limit_ms(self, case: Case) -> float:
        """The time that nothing can beat."""
        return 1e3 * max(case.num_bytes / self.bytes_per_s, case.num_flops / self.flops_per_s)


def check_tests() -> None:
    """Ends the program unless the kernels' tests pass on this card."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/kernels/gpu", "-q", "-x"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, check=False)
    if done.returncode != 0:
        sys.exit("The kernels' tests fail on this card: there is nothing to report until they pass (make test-gpu).")


def time_ms(run: Callable[[], object], *, graph: bool, repeats: int) -> Spread:
    """Milliseconds of the GPU for one call, from cold caches."""
    run()  # compiles, and makes workspaces
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for index in range(-3, repeats):
        cache.zero_()
        if index < 0:
            run()
            continue
        start, stop = events[index]
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return Spread.of([start.elapsed_time(stop) for start, stop in events])


def measure_ceilings(repeats: int) -> Ceilings:
    # Random numbers: zeros take less power, and with it less time.
    source, target = torch.randint(0, 100, (2, COPY_BYTES // 2), dtype=torch.int8, device="cuda")
    copy = time_ms(lambda: target.copy_(source), graph=False, repeats=repeats)
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device="cuda").bfloat16()
    product = time_ms(lambda: a @ b, graph=False, repeats=repeats)
    return Ceilings(1e3 * COPY_BYTES / copy.low, 1e3 * 2 * MATMUL_SIZE**3 / product.low)


def check_same(case: Case) -> None:
    """Ends the program where our result isn't the reference's: the peer's, or the float32 twin's."""
    expected = case.expected().float()
    error = (torch.linalg.vector_norm(case.ours().float() - expected) / torch.linalg.vector_norm(expected)).item()
    if not error <= MAX_RELATIVE_ERROR:
        sys.exit(f"{case.kernel}, {case.shape}: ours is off by a relative {error:.1e}.")


def report(cases: Iterator[Case], ceilings: Ceilings, repeats: int) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        check_same(case)
        ours = time_ms(case.ours, graph=case.graph, repeats=repeats)
        theirs = None if case.peer is None else time_ms(case.peer, graph=case.graph, repeats=repeats)
        results.append(
            {
                "kernel": case.kernel,
                "shape": case.shape,
                "ours_ms": ours,
                "fla_ms": theirs,
                "limit_ms": ceilings.limit_ms(case),
            }
        )
        print(f"{case.kernel}, {case.shape}: {ours.text(4)} ms", file=sys.stderr, flush=True)
    return results


def row(result: dict[str, Any]) -> list[object]:
    ours, theirs, limit_ms = result["ours_ms"], result["fla_ms"], result["limit_ms"]
    return [
        result["kernel"],
        result["shape"],
        ours.text(4),
        "-" if theirs is None else theirs.text(4),
        "-" if theirs is None else f"{theirs.median / ours.median:.2f}x",
        f"{limit_ms:.4f}",
        f"{limit_ms / ours.median:.0%}",
    ]


def numbers_of(text: str) -> list[int]:
    """ "1,2" -> [1, 2]."""
    return [int(part) for part in text.split(",")]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument("--lengths", type=numbers_of, default=[512, 1024, 2048, 4096, 8192, 16384, 65536])
    parser.add_argument("--batches", type=numbers_of, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This needs an NVIDIA card. On a CPU: python benchmarks/kernels_cpu.py")
    check_tests()
    torch.manual_seed(0)
    ceilings = measure_ceilings(arguments.repeats)
    cases = (
        case
        for name in arguments.models
        for case in (
            *prefill_cases(SHAPES[name], arguments.lengths, arguments.only),
            *decode_cases(SHAPES[name], arguments.batches, arguments.only),
        )
    )
    results = report(cases, ceilings, arguments.repeats)
    info = machine()
    print_machine(info)
    print(f"copies {ceilings.bytes_per_s / 1e12:.2f} TB/s, bf16 products {ceilings.flops_per_s / 1e12:.0f} TFLOP/s")
    header = ["kernel", "shape", "ours, ms", "fla, ms", "fla / ours", "limit, ms", "of the limit"]
    print_table(header, [row(result) for result in results])
    print_json("kernels", machine=info, ceilings=vars(ceilings), results=results)


if __name__ == "__main__":
    main()
