"""Our CPU kernels, compiled and in torch, and transformers', measured in one run at the shapes of Qwen3.5.

    python -m benchmarks.kernels_cpu --dtype bfloat16
    python -m benchmarks.kernels_cpu --threads 1 --clock cpu        on a busy machine: this thread's own CPU time

They take turns, so that what else the machine does hits all. Where results differ nothing is timed: the command fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3_5 import modeling_qwen3_5 as peer

from benchmarks.kernel_cases import SHAPES, Case, Cases, Shapes, relative_error, tensors
from benchmarks.report import Spread, machine, print_json, print_machine, print_table
from qwen35mm_kernels import cpu
from qwen35mm_kernels.cpu import native
from qwen35mm_kernels.cpu.gated_delta_rule import gdn_gates
from qwen35mm_kernels.cpu.native.library import find_library
from qwen35mm_kernels.reference.gated_delta_rule import split_heads, split_projection

Run = Callable[[], torch.Tensor]
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
MAX_RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
MODELS = ("0.8B", "9B")


def _delta_rule(name: str, *arguments: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Arguments and result with a batch first. Ours moves its state on in place: a copy costs the peer as much."""
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return getattr(peer, name)(*arguments, initial_state=state.clone(), **options)[0]


def _gated_delta_prefill(case: Case) -> Run:
    q, k, v, a, b, A_log, dt_bias, state = case.arguments

    def run() -> torch.Tensor:
        batched = [x[None] for x in (q, k, v, *gdn_gates(a, b, A_log, dt_bias))]
        return _delta_rule("torch_chunk_gated_delta_rule", *batched, state=state[None])[0]

    return run


def _gdn_decode_step(case: Case) -> Run:
    mixed, conv_weight, A_log, dt_bias, scale, _, conv_states, states, _ = case.arguments
    num_heads, key_dim, value_dim = states.shape[1:]
    norm = _with_weight(peer.Qwen3_5RMSNormGated, scale)

    def run() -> torch.Tensor:
        qkv, z, b, a = split_projection(mixed, conv_states.shape[1], num_heads)
        qkv = peer.causal_conv1d_update(qkv[..., None], conv_states.clone(), conv_weight, activation="silu")[..., 0]
        heads = split_heads(qkv, case.options["num_k_heads"], key_dim, value_dim)
        batched = [x[:, None] for x in (*heads, *gdn_gates(a, b, A_log, dt_bias))]
        out = _delta_rule("torch_recurrent_gated_delta_rule", *batched, state=states)[:, 0]
        return norm(out, z.unflatten(-1, out.shape[1:])).flatten(1)

    return run


def _causal_conv1d(case: Case) -> Run:
    x, weight, state = case.arguments
    state.zero_()  # the peer begins with none
    return lambda: peer.causal_conv1d_fn(x.t()[None], weight, activation="silu")[0].t()


def _gated_rms_norm(case: Case) -> Run:
    x, z, weight, _ = case.arguments
    norm = _with_weight(peer.Qwen3_5RMSNormGated, weight)
    return lambda: norm(x, z)


def _rms_norm(case: Case) -> Run:
    x, weight, _ = case.arguments
    norm = _with_weight(peer.Qwen3_5RMSNorm, weight)
    return lambda: norm(x)


def _with_weight(kind: Any, weight: torch.Tensor) -> Any:
    norm = kind(len(weight))
    norm.weight = torch.nn.Parameter(weight)
    return norm


def _apply_partial_rope(case: Case) -> Run:
    """The peer rotates a head of keys with them."""
    q, cos, sin = case.arguments
    full = [torch.cat([x, x], dim=-1) for x in (cos, sin)]
    return lambda: peer.apply_rotary_pos_emb_vision(q, q[:, :1], *full)[0]


def _paged_attention(case: Case) -> Run:
    """Without blocks; of a prefill, or of a decode step with one sequence."""
    q, gate, k, v = case.arguments[:4]
    module: Any = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=True)
    batched = [x.transpose(0, 1)[None] for x in (q, k, v)]
    causal = torch.ones(len(q), len(k), dtype=torch.bool).tril_(len(k) - len(q))[None, None]
    options = {"attention_mask": causal if 1 < len(q) < len(k) else None, "scaling": case.options["scale"]}
    return lambda: sdpa_attention_forward(module, *batched, **options)[0][0] * gate.sigmoid()


def _vision_attention(case: Case) -> Run:
    module: Any = SimpleNamespace(num_key_value_groups=1, is_causal=False)
    batched = [x.transpose(0, 1)[None] for x in case.arguments[:3]]
    return lambda: sdpa_attention_forward(module, *batched, attention_mask=None)[0][0]


# Each operation's sizes, as its method of `Cases` takes them, and what makes the peer of a case, if there is one.
PEERS: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[[Case], Run] | None]] = {
    "gated_delta_prefill": (((64,), (512,), (8192,)), _gated_delta_prefill),
    "gdn_decode_step": (((1,),), _gdn_decode_step),
    "causal_conv1d": (((512,), (2048,)), _causal_conv1d),
    "gated_rms_norm": (((1,), (512,)), _gated_rms_norm),
    "rms_norm": (((1,), (512,)), _rms_norm),
    "add_rms_norm": (((1,), (512,)), None),
    "swiglu": (((1,), (512,)), None),
    "apply_partial_rope": (((1024,), (4096,)), _apply_partial_rope),
    "qk_norm_rope_write": (((1,), (512,)), None),
    "paged_attention_prefill": (((512,), (512, 4608), (512, 8704)), _paged_attention),
    "paged_attention_decode": (((1, 512), (1, 4096)), _paged_attention),
    "vision_attention": (((1024,), (4096,)), _vision_attention),
    "sample": (((1,), (4,)), None),
}


def cases(shapes: Shapes, dtype: torch.dtype, only: str) -> Iterator[tuple[Case, Run | None]]:
    """Cases and what makes the same of them in transformers, if anything does."""
    made = Cases(shapes, "cpu", dtype)
    for operation, (sizes, peer_of) in PEERS.items():
        for size in sizes if only in operation else ():
            case = getattr(made, operation)(*size)
            yield case, peer_of and peer_of(case)


def measure(case: Case, theirs: Run | None, clock: Callable[[], float], repeats: int) -> dict[str, Spread]:
    """Checks that all compute the same, warms up, then times them in turns: milliseconds by who it was."""
    runs: dict[str, Callable[[], Any]] = {"torch": lambda: case.run(cpu)}
    if find_library() is not None:
        runs = {"compiled": lambda: case.run(native)} | runs
    if theirs is not None:
        runs["transformers"] = theirs
    before, results = [x.clone() for x in case.changed], []
    for run in runs.values():
        results.append(tensors(run())[0])
        for changed, kept in zip(case.changed, before, strict=True):
            changed.copy_(kept)
    *ours, expected = results
    for name, found in zip(runs, ours, strict=False):
        error = relative_error(found, expected)
        if not error <= MAX_RELATIVE_ERROR.get(expected.dtype, 0.0):
            sys.exit(f"{case.operation}: {name} is off by a relative {error:.1e}; run `make test` before measuring.")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(-2, repeats):
        for name, run in runs.items():
            start = clock()
            run()
            if repeat >= 0:
                times[name].append(1e3 * (clock() - start))
    return {name: Spread.of(seen) for name, seen in times.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="cpu: this thread's CPU time")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="measure kernels whose name contains this")
    args = parser.parse_args()
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu counts one thread: give --threads 1 with it")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows, results = [], []
    for name in MODELS:
        for case, theirs in cases(SHAPES[name], getattr(torch, args.dtype), args.only):
            print(f"{case.operation} {case.shape}", file=sys.stderr)
            times = measure(case, theirs, CLOCKS[args.clock], args.repeats)
            texts = (times[who].text(3) if who in times else "-" for who in ("compiled", "torch", "transformers"))
            ours = next(iter(times.values()))
            faster = {who: seen.median / ours.median for who, seen in times.items() if seen is not ours}
            rows.append((case.operation, case.shape, *texts, ", ".join(f"{ratio:.2f}" for ratio in faster.values())))
            result = {"kernel": case.operation, "shape": case.shape}
            results.append(result | {f"{who}_ms": seen for who, seen in times.items()} | {"times_faster": faster})
    info = machine()
    print_machine(info | {"dtype": args.dtype, "clock": args.clock, "repeats": args.repeats})
    print_table(("kernel", "shape", "compiled, ms", "torch, ms", "transformers, ms", "times faster than these"), rows)
    print_json("kernels_cpu", args, machine=info, results=results)


if __name__ == "__main__":
    main()
