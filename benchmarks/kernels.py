"""Our GPU kernels, their peers (flash-linear-attention or torch), and the card's limit, at Qwen3.5's shapes.

    python -m benchmarks.kernels                       everything; the peer's tuning takes minutes for each model
    python -m benchmarks.kernels --only prefill --models 9B --lengths 4096,8192

Run `make test-gpu` first. A case with a wrong result isn't timed; failed cases are listed at the end. The limit of a
case is the longer of two times: its bytes at the rate of a large copy, and its arithmetic at the rate of a large matrix
product, both measured in the same run. Bytes count every input read once and every output written once. Times are GPU
times with cold caches. Decode steps are replayed from CUDA graphs, as in the engine.

The peer of prefill attention is torch's flash attention, of FP8 and integer products torch's bfloat16 product, of
SwiGLU torch's. The other peers are flash-linear-attention's. If it lacks a part of ours (gates, and the convolution of
a decode step), that part isn't timed, nor are the copies that make its inputs dense.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.frame import Rows, Sample, Spread, numbers, parse, parser, report
from benchmarks.kernel_cases import SHAPES, Case, Cases, relative_error, tensors
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
# New tokens, and the sequence's length with them: turns of a conversation.
WARM_TURNS = ((128, 8192), (128, 32768), (512, 32768), (2048, 32768))
# Clock cycles that the card waits before a call (at least half a millisecond): the first try, and the limit.
HEAD_START_CYCLES = 1 << 20
MAX_HEAD_START_CYCLES = 1 << 30

_NORMS = ("causal_conv1d", "gated_rms_norm", "add_rms_norm", "swiglu")
_PRODUCTS = ("moe_experts", "integer_experts", "fp8_experts", "fp8_linear", "integer_linear")
PREFILL = ("gated_delta_prefill", *_NORMS, "paged_attention_prefill", *_PRODUCTS)
DECODE = ("gdn_decode_step", "paged_attention_decode", *_PRODUCTS, "norm_linear")

Run = Callable[[], object]
linear = torch.nn.functional.linear


class Missing(Exception):
    """flash-linear-attention isn't installed, or this version doesn't have the module."""


@functools.cache
def fla(*modules: str) -> Any:
    """The first of these modules that the installed flash-linear-attention has.

    Raises:
        Missing: it has none of them.
        ImportError: it is installed, but lacks a package that it needs.
    """
    if importlib.util.find_spec("fla") is not None:
        for module in modules:
            try:
                return importlib.import_module(f"fla.{module}")
            except ModuleNotFoundError as error:
                if error.name is None or not error.name.startswith("fla."):
                    raise
    raise Missing


def _gated_norm() -> Any:
    return fla("modules.fused_norm_gate", "modules.norm.fused_norm_gate").rms_norm_gated


def _gated_delta_prefill(case: Case) -> Run:
    q, k, v, a, b, A_log, dt_bias, states = case.arguments[:8]
    rule = fla("ops.gated_delta_rule").chunk_gated_delta_rule
    dense = [x[None].contiguous() for x in (q, k, v)]
    g, beta = gdn_gates(a, b, A_log, dt_bias)
    options = {"initial_state": states.clone(), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return functools.partial(rule, *dense, g[None], beta.bfloat16()[None], **options)


def _causal_conv1d(case: Case) -> Run:
    x, weight, states = case.arguments[:3]
    initial = torch.cat([torch.zeros_like(states[..., :1]), states], dim=2)
    options = {"initial_state": initial, "output_final_state": True, "activation": "silu"}
    return functools.partial(fla("modules.causal_conv1d.ops").causal_conv1d, x[None], weight, **options)


def _gated_rms_norm(case: Case) -> Run:
    x, z, weight, eps = case.arguments
    return functools.partial(_gated_norm(), x, z, weight, None, eps=eps)


def _add_rms_norm(case: Case) -> Run:
    x, delta, weight, eps = case.arguments
    norm, scale = fla("modules.layernorm", "modules.norm.layernorm").rms_norm, (1 + weight.float()).bfloat16()
    return functools.partial(norm, delta, scale, None, residual=x, eps=eps, prenorm=True)


def _gdn_decode_step(case: Case) -> Run:
    mixed, conv_weight, A_log, dt_bias, scale, eps, conv_states, states, _ = case.arguments
    rule, gated = fla("ops.gated_delta_rule").fused_recurrent_gated_delta_rule, _gated_norm()
    num_heads, key_dim, value_dim = states.shape[1:]
    qkv, z, b, a = split_projection(mixed, conv_states.shape[1], num_heads)
    qkv = causal_conv1d_step(qkv, conv_weight, conv_states.clone())
    dense = [x[:, None].contiguous() for x in split_heads(qkv, case.options["num_k_heads"], key_dim, value_dim)]
    gate = z.reshape(len(z), num_heads, value_dim)
    g, beta = gdn_gates(a, b, A_log, dt_bias)
    options = {"initial_state": states.clone(), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    step = functools.partial(rule, *dense, g[:, None], beta=beta.bfloat16()[:, None], **options)
    return lambda: gated(step()[0][:, 0], gate, scale, None, eps=eps)


def _fp8_linear(case: Case) -> Run:
    x, values, scales = case.arguments
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return functools.partial(linear, x, (values.float() * spread[: len(values), : values.shape[1]]).bfloat16())


def _integer_linear(case: Case) -> Run:
    x, *matrix = case.arguments
    weight = dequantise(*matrix, **case.options, in_features=x.shape[1], dtype=torch.bfloat16)
    return functools.partial(linear, x, weight)


def _norm_linear(case: Case) -> Run:
    """What larger batches use: the norm's kernel, torch's product, SwiGLU's kernel."""
    x, delta, weight, eps, matrix = case.arguments
    if weight is None:
        return functools.partial(linear, x, matrix)
    own = x.clone()
    return lambda: gpu.swiglu(linear(gpu.add_rms_norm(own, delta, weight, eps), matrix))


PEERS: dict[str, Callable[[Case], Run]] = {
    "gated_delta_prefill": _gated_delta_prefill,
    "causal_conv1d": _causal_conv1d,
    "gated_rms_norm": _gated_rms_norm,
    "add_rms_norm": _add_rms_norm,
    "swiglu": lambda case: functools.partial(cpu.swiglu, *case.arguments),
    "paged_attention_prefill": lambda case: functools.partial(flash_attention_prefill, *case.arguments, **case.options),
    "gdn_decode_step": _gdn_decode_step,
    "fp8_linear": _fp8_linear,
    "integer_linear": _integer_linear,
    "norm_linear": _norm_linear,
}


def peer_of(case: Case) -> Run | None:
    """The peer's operation with the same inputs, or None."""
    try:
        return PEERS[case.operation](case) if case.operation in PEERS else None
    except Missing:
        return None


@dataclass(frozen=True)
class Ceilings:
    """The best rates of this card.

    Attributes:
        bytes_per_s: of a large copy, reads and writes together.
        flops_per_s: of a large bfloat16 matrix product.
    """

    bytes_per_s: float
    flops_per_s: float

    def limit_ms(self, case: Case) -> float:
        return 1e3 * max(case.num_bytes / self.bytes_per_s, case.num_flops / self.flops_per_s)


def time_ms(run: Callable[[], object], *, graph: bool, repeats: int) -> Spread:
    """GPU milliseconds of one call, with cold caches.

    The card waits until all kernels of the call are queued. Otherwise the time of many small kernels would be that of
    the host's launches.

    Raises:
        RuntimeError: the call waits for the card, so the queue is always empty.
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
    # Random numbers, since zeros take less power and therefore less time.
    source, target = torch.randint(0, 100, (2, COPY_BYTES // 2), dtype=torch.int8, device="cuda")
    copy = time_ms(lambda: target.copy_(source), graph=False, repeats=repeats)
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device="cuda").bfloat16()
    product = time_ms(lambda: a @ b, graph=False, repeats=repeats)
    return Ceilings(1e3 * COPY_BYTES / copy.low, 1e3 * 2 * MATMUL_SIZE**3 / product.low)


def measure(case: Case, ceilings: Ceilings, *, graph: bool, repeats: int) -> Sample:
    """A row of the table. Raises ArithmeticError if our result is wrong."""
    for ours, expected in zip(tensors(case.run(gpu)), tensors(case.expected()), strict=True):
        error = relative_error(ours, expected)
        if not error <= MAX_RELATIVE_ERROR:
            raise ArithmeticError(f"off by a relative {error:.1e}")
    peer, limit_ms = peer_of(case), ceilings.limit_ms(case)
    ours_ms = time_ms(lambda: case.run(gpu), graph=graph, repeats=repeats)
    peer_ms = None if peer is None else time_ms(peer, graph=graph, repeats=repeats)
    row: Sample = {"kernel": case.operation, "shape": case.shape, "ours, ms": ours_ms, "peer, ms": peer_ms}
    row["peer / ours"] = None if peer_ms is None else peer_ms.median / ours_ms.median
    return row | {"limit, ms": limit_ms, "of the limit, %": 100 * limit_ms / ours_ms.median}


def cases_of(made: Cases, lengths: Sequence[int], batches: Sequence[int], only: str) -> Iterator[tuple[Case, bool]]:
    """Cases whose operation's name contains `only`, each with whether a CUDA graph replays it."""
    if only in "paged_attention_prefill":
        yield from ((made.paged_attention_prefill(*turn), False) for turn in WARM_TURNS)
    has_experts, has_fp8 = made.shapes.experts is not None, multiplies_fp8(torch.device(made.device))
    for operations, sizes, graph in ((PREFILL, lengths, False), (DECODE, batches, True)):
        for size in sizes:
            known = {
                "moe_experts": has_experts,
                "integer_experts": has_experts,
                "fp8_experts": has_experts and has_fp8,
                "fp8_linear": has_fp8,
                "norm_linear": size <= NORMED_ROWS,
            }
            for operation in operations:
                if only in operation and known.get(operation, True):
                    yield getattr(made, operation)(size), graph
                    if operation.startswith("integer_"):
                        yield getattr(made, operation)(size, 8), graph
                    if operation == "norm_linear":
                        yield made.norm_linear(size, is_plain=True), graph


def measure_all(cases: Iterator[tuple[Case, bool]], ceilings: Ceilings, repeats: int) -> tuple[Rows, list[str]]:
    """The rows, and each failed case with its error. Also prints rows to stderr as they come."""
    rows, failed = [], []
    for case, graph in cases:
        try:
            rows.append(measure(case, ceilings, graph=graph, repeats=repeats))
            print(rows[-1], file=sys.stderr, flush=True)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{case.operation}, {case.shape}: {type(error).__name__}: {error}")
    return rows, failed


@torch.inference_mode()
def main() -> None:
    options = parser(__doc__, model=False, repeats=20)
    options.add_argument("--models", type=lambda text: text.split(","), default=list(SHAPES))
    options.add_argument("--lengths", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16384, 65536])
    options.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    options.add_argument("--only", default="", help="kernels whose name contains this")
    arguments = parse(options)
    if not torch.cuda.is_available():
        sys.exit("This needs an NVIDIA card.")
    torch.manual_seed(0)
    ceilings = measure_ceilings(arguments.repeats)
    sizes = arguments.lengths, arguments.batches
    cases = (case for name in arguments.models for case in cases_of(Cases(SHAPES[name]), *sizes, arguments.only))
    rows, failed = measure_all(cases, ceilings, arguments.repeats)
    card = {"copies, TB/s": ceilings.bytes_per_s / 1e12, "bf16 products, TFLOP/s": ceilings.flops_per_s / 1e12}
    report("kernels", arguments, {"The card": [card], "Kernels": rows}, failed=failed)
    if failed:
        sys.exit("Not measured:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
