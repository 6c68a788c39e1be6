"""Our GPU kernels, flash-linear-attention's, and what the card allows, in one run at the shapes of Qwen3.5.

    python benchmarks/kernels.py                       everything; the peer's tuning alone takes minutes a model
    python benchmarks/kernels.py --only prefill --models 9B --lengths 4096,8192

Runs the kernels' tests first and reports nothing where one fails. A pair whose results differ isn't timed, and what
fails is named at the end; each case is told as soon as it is measured. The limit of a case is the larger of its bytes
over what a large copy moves here and its arithmetic over what a large matrix product does here, both measured in the
same run; bytes count every input read once and every output written once. Times are the GPU's own: it is kept waiting
until all of a call's kernels are in its queue. Caches are cold: a buffer of their size is overwritten before each call.
Decode steps are replayed from CUDA graphs, as the engine does, ours and the peer's.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "preprocess")]

import torch  # noqa: E402

from benchmarks.kernel_cases import Case, decode_cases, prefill_cases  # noqa: E402
from benchmarks.report import Spread, machine, print_json, print_machine, print_table  # noqa: E402
from benchmarks.shapes import SHAPES  # noqa: E402

MAX_RELATIVE_ERROR = 1e-2
COPY_BYTES = 4 << 30
MATMUL_SIZE = 8192
# Clock cycles that the card waits at first, half a millisecond or more, and at most.
HEAD_START_CYCLES = 1 << 20
MAX_HEAD_START_CYCLES = 1 << 30


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
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/kernels", "-q", "-x"]
    if importlib.util.find_spec("xdist") is not None:
        # Most of the time is the compiler's, which runs on one core.
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, check=False)
    if done.returncode != 0:
        sys.exit("The kernels' tests fail on this card: there is nothing to report until they pass (make test-gpu).")


def time_ms(run: Callable[[], object], *, graph: bool, repeats: int) -> Spread:
    """Milliseconds of the GPU for one call, from cold caches.

    The card is kept busy until all of a call's kernels are in its queue. Else a call of many small kernels would be
    timed by how fast this program launches them.

    Raises:
        RuntimeError: the card always finds its queue empty: the call waits for it.
    """
    run()  # compiles, and makes workspaces
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for _ in range(3):
        cache.zero_()
        run()
    times, cycles = [], HEAD_START_CYCLES
    while len(times) < repeats:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        torch.cuda._sleep(cycles)
        start.record()
        run()
        stop.record()
        was_ahead = start.query()
        stop.synchronize()
        if not was_ahead:
            times.append(start.elapsed_time(stop))
        elif cycles < MAX_HEAD_START_CYCLES:
            cycles *= 2
        else:
            raise RuntimeError("The call waits for the card: its time can't be told from the host's.")
    return Spread.of(times)


def measure_ceilings(repeats: int) -> Ceilings:
    # Random numbers: zeros take less power, and with it less time.
    source, target = torch.randint(0, 100, (2, COPY_BYTES // 2), dtype=torch.int8, device="cuda")
    copy = time_ms(lambda: target.copy_(source), graph=False, repeats=repeats)
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device="cuda").bfloat16()
    product = time_ms(lambda: a @ b, graph=False, repeats=repeats)
    return Ceilings(1e3 * COPY_BYTES / copy.low, 1e3 * 2 * MATMUL_SIZE**3 / product.low)


def check_same(case: Case) -> None:
    """Raises ArithmeticError where our result isn't the reference's: the peer's, or the float32 twin's."""
    expected = case.expected().float()
    error = (torch.linalg.vector_norm(case.ours().float() - expected) / torch.linalg.vector_norm(expected)).item()
    if not error <= MAX_RELATIVE_ERROR:
        raise ArithmeticError(f"ours is off by a relative {error:.1e}")


def measure(case: Case, ceilings: Ceilings, repeats: int) -> dict[str, Any]:
    check_same(case)
    ours = time_ms(case.ours, graph=case.graph, repeats=repeats)
    theirs = None if case.peer is None else time_ms(case.peer, graph=case.graph, repeats=repeats)
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "ours_ms": ours,
        "fla_ms": theirs,
        "limit_ms": ceilings.limit_ms(case),
    }


def report(cases: Iterator[Case], ceilings: Ceilings, repeats: int) -> tuple[list[dict[str, Any]], list[str]]:
    """What was measured, and which cases could not be, each with its error."""
    results, failed = [], []
    for case in cases:
        try:
            results.append(measure(case, ceilings, repeats))
            print(" | ".join(map(str, row(results[-1]))), file=sys.stderr, flush=True)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{case.kernel}, {case.shape}: {type(error).__name__}: {error}")
    return results, failed


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
    results, failed = report(cases, ceilings, arguments.repeats)
    info = machine()
    print_machine(info)
    print(f"copies {ceilings.bytes_per_s / 1e12:.2f} TB/s, bf16 products {ceilings.flops_per_s / 1e12:.0f} TFLOP/s")
    header = ["kernel", "shape", "ours, ms", "fla, ms", "fla / ours", "limit, ms", "of the limit"]
    print_table(header, [row(result) for result in results])
    print_json("kernels", machine=info, ceilings=vars(ceilings), results=results, failed=failed)
    if failed:
        sys.exit("Not measured:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
