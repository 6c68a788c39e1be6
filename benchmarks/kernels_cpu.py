"""Our CPU kernels and transformers' torch versions, measured in one run at the shapes of Qwen3.5.

    python -m benchmarks.kernels_cpu [--dtype bfloat16] [--threads 1] [--clock cpu] [--repeats 9]

Us and the peer take turns, so that what else the machine does hits both. A pair whose results differ isn't timed: the
command fails. On a busy machine take `--threads 1 --clock cpu`, which counts this thread's own CPU time.
A table comes first, one line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3_5 import modeling_qwen3_5 as peer

import qwen35mm_kernels as kernels

Run = Callable[[], torch.Tensor]
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
MAX_RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Shapes:
    """The sizes of a checkpoint that its kernels see."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    v_heads: int
    vision_heads: int
    vision_head_dim: int
    k_heads: int = 16
    gdn_dim: int = 128
    head_dim: int = 256
    rotary_dim: int = 64


SHAPES = (Shapes("0.8B", 1024, 8, 2, 16, 12, 64), Shapes("9B", 4096, 16, 4, 32, 16, 72))


@dataclass(frozen=True)
class Result:
    """One pair: medians and spreads in milliseconds."""

    kernel: str
    shape: str
    ours_ms: float
    ours_min_ms: float
    ours_max_ms: float
    peer_ms: float
    peer_min_ms: float
    peer_max_ms: float
    speedup: float


def gdn_pairs(s: Shapes, dtype: torch.dtype) -> Iterator[tuple[str, str, Run, Run]]:
    """(kernel, shape, ours, peer's) of the Gated DeltaNet layer."""
    key_dim, value_dim = s.k_heads * s.gdn_dim, s.v_heads * s.gdn_dim
    channels = 2 * key_dim + value_dim
    weight = (torch.rand(channels, 4) - 0.5).to(dtype)

    def inputs(tokens: int) -> list[torch.Tensor]:
        q, k, v = torch.randn(tokens, channels).to(dtype).split([key_dim, key_dim, value_dim], dim=-1)
        g = -torch.empty(tokens, s.v_heads).uniform_(-7, -2).exp()
        heads = [x.unflatten(-1, (-1, s.gdn_dim)) for x in (q, k, v)]
        return [*heads, g, torch.rand(tokens, s.v_heads).to(dtype)]

    state = torch.randn(1, s.v_heads, s.gdn_dim, s.gdn_dim)
    flags = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    for tokens in (64, 512, 2048):
        args = inputs(tokens)
        batched = [x[None] for x in args]
        yield (
            "chunk_gated_delta_rule",
            f"T={tokens} heads={s.k_heads}/{s.v_heads}",
            lambda args=args: kernels.chunk_gated_delta_rule(*args, state[0])[0],
            lambda batched=batched: peer.torch_chunk_gated_delta_rule(*batched, **flags)[0][0],
        )
    args = inputs(1)
    batched = [x[None] for x in args]
    # Ours moves its state on in place: with a fresh one each time both compute the same.
    yield (
        "recurrent_gated_delta_step",
        f"B=1 heads={s.k_heads}/{s.v_heads} (with a copy of the state)",
        lambda: kernels.recurrent_gated_delta_step(*args, state.clone()),
        lambda: peer.torch_recurrent_gated_delta_rule(*batched, **flags | {"initial_state": state.clone()})[0][0],
    )
    for tokens in (512, 2048):
        x = torch.randn(tokens, channels).to(dtype)
        yield (
            "causal_conv1d",
            f"T={tokens} C={channels}",
            lambda x=x: kernels.causal_conv1d(x, weight)[0],
            lambda x=x: peer.causal_conv1d_fn(x.t()[None], weight, activation="silu")[0].t(),
        )
    x, conv_state = torch.randn(1, channels).to(dtype), torch.zeros(1, channels, 3).to(dtype)
    yield (
        "causal_conv1d_step",
        f"B=1 C={channels} (with a copy of the state)",
        lambda: kernels.causal_conv1d_step(x, weight, conv_state.clone()),
        lambda: peer.causal_conv1d_update(x[..., None], conv_state.clone(), weight, activation="silu")[..., 0],
    )
    norm = peer.Qwen3_5RMSNormGated(s.gdn_dim).to(dtype)
    for tokens in (1, 512):
        x, z = torch.randn(2, tokens, s.v_heads, s.gdn_dim).to(dtype)
        yield (
            "gated_rms_norm",
            f"T={tokens} {s.v_heads}x{s.gdn_dim}",
            lambda x=x, z=z: kernels.gated_rms_norm(x, z, norm.weight, 1e-6),
            lambda x=x, z=z: norm(x, z),
        )


def attention_pairs(s: Shapes, dtype: torch.dtype) -> Iterator[tuple[str, str, Run, Run]]:
    """(kernel, shape, ours, peer's) of the full-attention layer, the norms and the vision tower."""
    norm = peer.Qwen3_5RMSNorm(s.hidden).to(dtype)
    for tokens in (1, 512):
        x = torch.randn(tokens, s.hidden).to(dtype)
        yield (
            "rms_norm",
            f"T={tokens} D={s.hidden}",
            lambda x=x: kernels.rms_norm(x, norm.weight, 1e-6, zero_centred=True),
            lambda x=x: norm(x),
        )
        q, angles = torch.randn(tokens, s.heads, s.head_dim).to(dtype), torch.randn(tokens, s.rotary_dim // 2)
        cos, sin = angles.cos().to(dtype).float(), angles.sin().to(dtype).float()
        full = [torch.cat([x, x], -1).to(dtype)[None] for x in (cos, sin)]
        yield (
            "apply_partial_rope",
            f"T={tokens} {s.heads}x{s.head_dim}, {s.rotary_dim} rotated (q; peer: q and a head of k)",
            lambda q=q, cos=cos, sin=sin: kernels.apply_partial_rope(q, cos, sin),
            lambda q=q, full=full: peer.apply_rotary_pos_emb(q[None], q[None, :, :1], *full, unsqueeze_dim=2)[0][0],
        )
    module, scale = SimpleNamespace(num_key_value_groups=s.heads // s.kv_heads, is_causal=True), s.head_dim**-0.5
    for tokens, length in ((512, 512), (512, 4096), (1, 512), (1, 4096)):
        q = torch.randn(tokens, s.heads, s.head_dim).to(dtype)
        k, v = torch.randn(2, length, s.kv_heads, s.head_dim).to(dtype)
        batched = [x.transpose(0, 1)[None] for x in (q, k, v)]
        causal = torch.ones(tokens, length, dtype=torch.bool).tril_(length - tokens)[None, None]
        mask = causal if 1 < tokens < length else None

        def ours(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            if len(q) == 1:
                return kernels.attention_decode(q[0], k, v, scale=scale)[None]
            return kernels.attention_prefill(q, k, v, scale=scale)

        yield (
            "attention_decode" if tokens == 1 else "attention_prefill",
            f"T={tokens} L={length} heads={s.heads}/{s.kv_heads}x{s.head_dim}",
            ours,
            lambda batched=batched, mask=mask: sdpa_attention_forward(
                module,  # type: ignore[arg-type]
                *batched,
                attention_mask=mask,
                scaling=scale,
            )[0][0],
        )
    q, k, v = torch.randn(3, 1024, s.vision_heads, s.vision_head_dim).to(dtype)
    batched = [x.transpose(0, 1)[None] for x in (q, k, v)]
    vision = SimpleNamespace(num_key_value_groups=1, is_causal=False)
    yield (
        "vision_attention",
        f"P=1024 {s.vision_heads}x{s.vision_head_dim}, one frame",
        lambda: kernels.vision_attention(q, k, v, [0, 1024]),
        lambda: sdpa_attention_forward(vision, *batched, attention_mask=None)[0][0],  # type: ignore[arg-type]
    )


def measure(kernel: str, shape: str, ours: Run, theirs: Run, clock: Callable[[], float], repeats: int) -> Result:
    """Checks that both compute the same, warms up, then times them in turns."""
    expected = theirs().double()
    error = (torch.linalg.vector_norm(ours().double() - expected) / torch.linalg.vector_norm(expected)).item()
    if not error <= MAX_RELATIVE_ERROR[theirs().dtype]:
        sys.exit(f"{kernel} {shape}: ours is off by a relative {error:.1e}; run `make test` before measuring.")
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(-2, repeats):
        for run, seen in zip((ours, theirs), times, strict=True):
            start = clock()
            run()
            if repeat >= 0:
                seen.append(1e3 * (clock() - start))
    (a, a_min, a_max), (b, b_min, b_max) = ((statistics.median(seen), min(seen), max(seen)) for seen in times)
    return Result(kernel, shape, a, a_min, a_max, b, b_min, b_max, b / a)


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = cpuinfo.read_text().split("model name") if cpuinfo.exists() else []
    return names[1].split(":")[1].splitlines()[0].strip() if len(names) > 1 else platform.processor()


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
    dtype = getattr(torch, args.dtype)
    machine = {
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": args.threads,
        "clock": args.clock,
        "dtype": args.dtype,
        "repeats": args.repeats,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(
        f"{'kernel':<27} {'ms, ours (min..max)':>29} {'ms, transformers (min..max)':>29} {'faster':>7}  model and shape"
    )
    results = []
    for shapes in SHAPES:
        for pairs in (gdn_pairs, attention_pairs):
            for kernel, shape, ours, theirs in pairs(shapes, dtype):
                if args.only not in kernel:
                    continue
                result = measure(kernel, f"{shapes.name} {shape}", ours, theirs, CLOCKS[args.clock], args.repeats)
                results.append(result)
                a = f"{result.ours_ms:.3f} ({result.ours_min_ms:.3f}..{result.ours_max_ms:.3f})"
                b = f"{result.peer_ms:.3f} ({result.peer_min_ms:.3f}..{result.peer_max_ms:.3f})"
                print(f"{kernel:<27} {a:>29} {b:>29} {result.speedup:>6.2f}x  {result.shape}", flush=True)
    print(json.dumps({"benchmark": "kernels_cpu", **machine, "results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
