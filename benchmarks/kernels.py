"""Our GPU kernels, flash-linear-attention's, and what the card allows, in one run at the shapes of Qwen3.5.

    python -m benchmarks.kernels                       everything; the peer's tuning alone takes minutes a model
    python -m benchmarks.kernels --only prefill --models 9B --lengths 4096,8192

Runs the kernels' tests first and reports nothing where one fails. A pair whose results differ isn't timed, and what
fails is named at the end; each case is told as soon as it is measured. The limit of a case is the larger of its bytes
over what a large copy moves here and its arithmetic over what a large matrix product does here, both measured in the
same run; bytes count every input read once and every output written once. Times are the GPU's own: it is kept waiting
until all of a call's kernels are in its queue. Caches are cold: a buffer of their size is overwritten before each call.
Decode steps are replayed from CUDA graphs, as the engine does, ours and the peer's.

Where ours does more in one call, the peer is what does the same by flash-linear-attention's operations one after the
other, without what it has no operation for (gates, and a decode step's convolution): its result is made before. Its
functions want dense inputs, and get them: the copies that a model has to make for them are not counted. Beside the
attention of a prefill stands torch's flash attention, beside products with eight-bit floats or integers torch's of
bfloat16.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.kernel_cases import SHAPES, Case, Cases, relative_error, tensors
from benchmarks.report import Spread, machine, print_json, print_machine, print_table
from benchmarks.worker import numbers
from qwen35mm_kernels import cpu, gpu
from qwen35mm_kernels.backend import multiplies_fp8
from qwen35mm_kernels.cpu.conv1d import causal_conv1d_step
from qwen35mm_kernels.cpu.gated_delta_rule import gdn_gates
from qwen35mm_kernels.cpu.quantise import dequantise
from qwen35mm_kernels.gpu.attention_prefill import flash_attention_prefill
from qwen35mm_kernels.gpu.normed import MAX_ROWS as NORMED_ROWS
from qwen35mm_kernels.reference.gated_delta_rule import split_heads, split_projection

MAX_RELATIVE_ERROR = 1e-2
COPY_BYTES = 4 << 30
MATMUL_SIZE = 8192
# New tokens and all of a sequence's: a turn of a conversation that is there already.
WARM_TURNS = ((128, 8192), (128, 32768), (512, 32768), (2048, 32768))
# Clock cycles that the card waits at first, half a millisecond or more, and at most.
HEAD_START_CYCLES = 1 << 20
MAX_HEAD_START_CYCLES = 1 << 30

PREFILL = (
    "gated_delta_prefill",
    "causal_conv1d",
    "gated_rms_norm",
    "add_rms_norm",
    "swiglu",
    "paged_attention_prefill",
    "moe_experts",
    "fp8_linear",
    "integer_linear",
)
DECODE = ("gdn_decode_step", "paged_attention_decode", "moe_experts", "fp8_linear", "integer_linear", "norm_linear")

Run = Callable[[], object]


@functools.cache
def fla(module: str) -> Any:
    """A module of flash-linear-attention, None where it isn't installed: then the peer's columns are empty.

    Raises:
        ImportError: it is installed, and something that it needs isn't.
    """
    if importlib.util.find_spec("fla") is None:
        return None
    try:
        return importlib.import_module(f"fla.{module}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("fla."):
            return None  # this version has it elsewhere
        raise


def peer_of(case: Case) -> Run | None:
    """What others do for the same inputs, ready to be run; None where they have no such operation, or aren't there."""
    make = _PEERS.get(case.operation)
    return None if make is None else make(case)


def _gated_delta_prefill(case: Case) -> Run | None:
    q, k, v, a, b, A_log, dt_bias, state = case.arguments
    module = fla("ops.gated_delta_rule")
    if module is None:
        return None
    dense = [x[None].contiguous() for x in (q, k, v)]
    g, beta = gdn_gates(a, b, A_log, dt_bias)
    return functools.partial(
        module.chunk_gated_delta_rule,
        *dense,
        g[None],
        beta.bfloat16()[None],
        initial_state=state[None].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def _causal_conv1d(case: Case) -> Run | None:
    x, weight, state = case.arguments
    module = fla("modules.causal_conv1d.ops")
    if module is None:
        return None
    initial = torch.cat([torch.zeros_like(state[:, :1]), state], dim=1)[None]
    options = {"initial_state": initial, "output_final_state": True, "activation": "silu"}
    return functools.partial(module.causal_conv1d, x[None], weight, **options)


def _gated_norm_of_fla() -> Any:
    return fla("modules.fused_norm_gate") or fla("modules.norm.fused_norm_gate")


def _swiglu_by_torch(case: Case) -> Run:
    (gate_up,) = case.arguments
    return lambda: cpu.swiglu(gate_up)


def _gated_rms_norm(case: Case) -> Run | None:
    x, z, weight, eps = case.arguments
    module = _gated_norm_of_fla()
    return None if module is None else functools.partial(module.rms_norm_gated, x, z, weight, None, eps=eps)


def _add_rms_norm(case: Case) -> Run | None:
    x, delta, weight, eps = case.arguments
    module = fla("modules.layernorm") or fla("modules.norm.layernorm")
    if module is None:
        return None
    scale = (1 + weight.float()).bfloat16()
    return functools.partial(module.rms_norm, delta, scale, None, residual=x, eps=eps, prenorm=True)


def _gdn_decode_step(case: Case) -> Run | None:
    mixed, conv_weight, A_log, dt_bias, scale, eps, conv_states, states, _ = case.arguments
    module, gated = fla("ops.gated_delta_rule"), _gated_norm_of_fla()
    if module is None or gated is None:
        return None
    num_heads, key_dim, value_dim = states.shape[1:]
    qkv, z, b, a = split_projection(mixed, conv_states.shape[1], num_heads)
    qkv = causal_conv1d_step(qkv, conv_weight, conv_states.clone())
    dense = [x[:, None].contiguous() for x in split_heads(qkv, case.options["num_k_heads"], key_dim, value_dim)]
    gate = z.reshape(len(z), num_heads, value_dim)
    g, beta = gdn_gates(a, b, A_log, dt_bias)
    beta, theirs = beta.bfloat16(), states.clone()

    def run() -> object:
        out, _ = module.fused_recurrent_gated_delta_rule(
            *dense,
            g[:, None],
            beta=beta[:, None],
            initial_state=theirs,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return gated.rms_norm_gated(out[:, 0], gate, scale, None, eps=eps)

    return run


def _flash_attention(case: Case) -> Run:
    return functools.partial(flash_attention_prefill, *case.arguments, **case.options)


def _bfloat16_linear(case: Case) -> Run:
    x, values, scales = case.arguments
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    weight = values.float() * spread[: len(values), : values.shape[1]]
    return functools.partial(torch.nn.functional.linear, x, weight.bfloat16())


def _bfloat16_of_integers(case: Case) -> Run:
    x, *matrix = case.arguments
    weight = dequantise(*matrix, **case.options, in_features=x.shape[1], dtype=torch.bfloat16)
    return functools.partial(torch.nn.functional.linear, x, weight)


def _norm_then_linear(case: Case) -> Run:
    """As more rows go: the norm's kernel, torch's product, and SwiGLU's kernel."""
    x, delta, weight, eps, matrix = case.arguments
    own = x.clone()
    return lambda: gpu.swiglu(torch.nn.functional.linear(gpu.add_rms_norm(own, delta, weight, eps), matrix))


_PEERS: dict[str, Callable[..., Run | None]] = {
    "gated_delta_prefill": _gated_delta_prefill,
    "causal_conv1d": _causal_conv1d,
    "gated_rms_norm": _gated_rms_norm,
    "add_rms_norm": _add_rms_norm,
    "swiglu": _swiglu_by_torch,
    "paged_attention_prefill": _flash_attention,
    "gdn_decode_step": _gdn_decode_step,
    "fp8_linear": _bfloat16_linear,
    "integer_linear": _bfloat16_of_integers,
    "norm_linear": _norm_then_linear,
}


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


def measure(case: Case, ceilings: Ceilings, *, graph: bool, repeats: int) -> dict[str, Any]:
    """Raises ArithmeticError where our result isn't the reference's."""
    expected = tensors(case.expected())
    for ours, theirs in zip(tensors(case.run(gpu)), expected, strict=True):
        error = relative_error(ours, theirs)
        if not error <= MAX_RELATIVE_ERROR:
            raise ArithmeticError(f"ours is off by a relative {error:.1e}")
    peer = peer_of(case)
    return {
        "kernel": case.operation,
        "shape": case.shape,
        "ours_ms": time_ms(lambda: case.run(gpu), graph=graph, repeats=repeats),
        "fla_ms": None if peer is None else time_ms(peer, graph=graph, repeats=repeats),
        "limit_ms": ceilings.limit_ms(case),
    }


def cases_of(made: Cases, lengths: Sequence[int], batches: Sequence[int], only: str) -> Iterator[tuple[Case, bool]]:
    """The operations whose name contains `only`, and whether a case is replayed from a CUDA graph."""
    if only in "paged_attention_prefill":
        yield from ((made.paged_attention_prefill(*turn), False) for turn in WARM_TURNS)
    for operations, sizes, graph in ((PREFILL, lengths, False), (DECODE, batches, True)):
        for size in sizes:
            for operation in operations:
                has_experts, has_fp8 = made.shapes.experts is not None, multiplies_fp8(torch.device(made.device))
                conditions = {"moe_experts": has_experts, "fp8_linear": has_fp8, "norm_linear": size <= NORMED_ROWS}
                there_is = conditions.get(operation, True)
                if only in operation and there_is:
                    yield getattr(made, operation)(size), graph
                    if operation == "integer_linear":
                        yield made.integer_linear(size, 8), graph


def report(
    cases: Iterator[tuple[Case, bool]], ceilings: Ceilings, repeats: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """What was measured, and which cases could not be, each with its error."""
    results, failed = [], []
    for case, graph in cases:
        try:
            results.append(measure(case, ceilings, graph=graph, repeats=repeats))
            print(" | ".join(map(str, row(results[-1]))), file=sys.stderr, flush=True)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{case.operation}, {case.shape}: {type(error).__name__}: {error}")
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


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument("--lengths", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16384, 65536])
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This needs an NVIDIA card. On a CPU: python -m benchmarks.kernels_cpu")
    check_tests()
    torch.manual_seed(0)
    ceilings = measure_ceilings(arguments.repeats)
    sizes = arguments.lengths, arguments.batches
    cases = (case for name in arguments.models for case in cases_of(Cases(SHAPES[name]), *sizes, arguments.only))
    results, failed = report(cases, ceilings, arguments.repeats)
    info = machine()
    print_machine(info)
    print(f"copies {ceilings.bytes_per_s / 1e12:.2f} TB/s, bf16 products {ceilings.flops_per_s / 1e12:.0f} TFLOP/s")
    header = ["kernel", "shape", "ours, ms", "fla, ms", "fla / ours", "limit, ms", "of the limit"]
    print_table(header, [row(result) for result in results])
    print_json("kernels", arguments, machine=info, ceilings=vars(ceilings), results=results, failed=failed)
    if failed:
        sys.exit("Not measured:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
