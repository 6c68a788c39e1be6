"""Our CPU kernels and transformers' torch versions, measured in one run at the shapes of Qwen3.5.

    python benchmarks/kernels_cpu.py --dtype bfloat16
    python benchmarks/kernels_cpu.py --threads 1 --clock cpu        on a busy machine: this thread's own CPU time

Us and the peer take turns, so that what else the machine does hits both. A pair whose results differ isn't timed: the
command fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "preprocess")]

import torch  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.models.qwen3_5 import modeling_qwen3_5 as peer  # noqa: E402

from benchmarks.report import Spread, machine, print_json, print_machine, print_table  # noqa: E402
from benchmarks.shapes import SHAPES, Shapes  # noqa: E402
from qwen35mm_kernels import cpu  # noqa: E402
from qwen35mm_kernels.cpu.attention import attention_decode, attention_prefill  # noqa: E402
from qwen35mm_kernels.cpu.conv1d import causal_conv1d_step  # noqa: E402
from qwen35mm_kernels.cpu.gated_delta_rule import gated_delta_step, gdn_gates  # noqa: E402

Run = Callable[[], torch.Tensor]
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
MAX_RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


MODELS = ("0.8B", "9B")

Pair = tuple[str, str, Run, Run]


def gdn_pairs(s: Shapes, dtype: torch.dtype) -> Iterator[Pair]:
    """(kernel, shape, ours, peer's) of the Gated DeltaNet layer."""
    key_dim, value_dim = s.k_heads * s.gdn_dim, s.v_heads * s.gdn_dim
    channels = 2 * key_dim + value_dim
    weight = (torch.rand(channels, 4) - 0.5).to(dtype)

    A_log, dt_bias = torch.rand(s.v_heads) * 2 - 4, torch.zeros(s.v_heads)

    def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v, a and b."""
        q, k, v = torch.randn(tokens, channels).to(dtype).split([key_dim, key_dim, value_dim], dim=-1)
        a, b = torch.randn(2, tokens, s.v_heads).to(dtype)
        q, k, v = (x.unflatten(-1, (-1, s.gdn_dim)) for x in (q, k, v))
        return q, k, v, a, b

    state = torch.randn(1, s.v_heads, s.gdn_dim, s.gdn_dim)

    def peers(name: str, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        q, k, v, a, b = args
        batched = [x[None] for x in (q, k, v, *gdn_gates(a, b, A_log, dt_bias))]
        rule = getattr(peer, name)
        return rule(*batched, initial_state=state.clone(), output_final_state=True, use_qk_l2norm_in_kernel=True)[0][0]

    # Ours moves its state on in place: with a fresh one each time both compute the same.
    for tokens in (64, 512, 2048):
        args = inputs(tokens)
        yield (
            "gated_delta_prefill",
            f"T={tokens} heads={s.k_heads}/{s.v_heads}",
            lambda args=args: cpu.gated_delta_prefill(*args, A_log, dt_bias, state[0].clone()),
            lambda args=args: peers("torch_chunk_gated_delta_rule", args),
        )
    args = inputs(1)
    yield (
        "gated_delta_step",
        f"B=1 heads={s.k_heads}/{s.v_heads}",
        lambda: gated_delta_step(*args[:3], *gdn_gates(*args[3:], A_log, dt_bias), state.clone()),
        lambda: peers("torch_recurrent_gated_delta_rule", args),
    )
    empty = torch.zeros(channels, 3, dtype=dtype)
    for tokens in (512, 2048):
        x = torch.randn(tokens, channels).to(dtype)
        yield (
            "causal_conv1d",
            f"T={tokens} C={channels}",
            lambda x=x: cpu.causal_conv1d(x, weight, empty)[0],
            lambda x=x: peer.causal_conv1d_fn(x.t()[None], weight, activation="silu")[0].t(),
        )
    x, conv_state = torch.randn(1, channels).to(dtype), torch.zeros(1, channels, 3).to(dtype)
    yield (
        "causal_conv1d_step",
        f"B=1 C={channels} (with a copy of the state)",
        lambda: causal_conv1d_step(x, weight, conv_state.clone()),
        lambda: peer.causal_conv1d_update(x[..., None], conv_state.clone(), weight, activation="silu")[..., 0],
    )
    norm = peer.Qwen3_5RMSNormGated(s.gdn_dim).to(dtype)
    for tokens in (1, 512):
        x, z = torch.randn(2, tokens, s.v_heads, s.gdn_dim).to(dtype)
        yield (
            "gated_rms_norm",
            f"T={tokens} {s.v_heads}x{s.gdn_dim}",
            lambda x=x, z=z: cpu.gated_rms_norm(x, z, norm.weight, 1e-6),
            lambda x=x, z=z: norm(x, z),
        )


def attention_pairs(s: Shapes, dtype: torch.dtype) -> Iterator[Pair]:
    """(kernel, shape, ours, peer's) of the full-attention layer, the norms and the vision tower."""
    norm = peer.Qwen3_5RMSNorm(s.hidden).to(dtype)
    for tokens in (1, 512):
        x = torch.randn(tokens, s.hidden).to(dtype)
        yield (
            "rms_norm",
            f"T={tokens} D={s.hidden}",
            lambda x=x: cpu.rms_norm(x, norm.weight, 1e-6, zero_centred=True),
            lambda x=x: norm(x),
        )
        q, angles = torch.randn(tokens, s.heads, s.head_dim).to(dtype), torch.randn(tokens, s.rotary_dim // 2)
        cos, sin = angles.cos().to(dtype).float(), angles.sin().to(dtype).float()
        full = [torch.cat([x, x], -1).to(dtype)[None] for x in (cos, sin)]
        yield (
            "apply_partial_rope",
            f"T={tokens} {s.heads}x{s.head_dim}, {s.rotary_dim} rotated (q; peer: q and a head of k)",
            lambda q=q, cos=cos, sin=sin: cpu.apply_partial_rope(q, cos, sin),
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
                return attention_decode(q[0], k, v, scale=scale)[None]
            return attention_prefill(q, k, v, scale=scale)

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
        lambda: cpu.vision_attention(q, k, v, 1),
        lambda: sdpa_attention_forward(vision, *batched, attention_mask=None)[0][0],  # type: ignore[arg-type]
    )


def measure(name: str, ours: Run, theirs: Run, clock: Callable[[], float], repeats: int) -> tuple[Spread, Spread]:
    """Checks that both compute the same, warms up, then times them in turns; milliseconds, ours first."""
    expected = theirs()
    difference = torch.linalg.vector_norm(ours().double() - expected.double())
    error = (difference / torch.linalg.vector_norm(expected.double())).item()
    if not error <= MAX_RELATIVE_ERROR[expected.dtype]:
        sys.exit(f"{name}: ours is off by a relative {error:.1e}; run `make test` before measuring.")
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(-2, repeats):
        for run, seen in zip((ours, theirs), times, strict=True):
            start = clock()
            run()
            if repeat >= 0:
                seen.append(1e3 * (clock() - start))
    return Spread.of(times[0]), Spread.of(times[1])


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
    for shapes in (SHAPES[name] for name in MODELS):
        for pairs in (gdn_pairs, attention_pairs):
            for kernel, shape, ours, theirs in pairs(shapes, getattr(torch, args.dtype)):
                if args.only not in kernel:
                    continue
                print(f"{shapes.name} {kernel} {shape}", file=sys.stderr)
                us, peers = measure(kernel, ours, theirs, CLOCKS[args.clock], args.repeats)
                faster = peers.median / us.median
                rows.append((kernel, shapes.name, shape, us.text(3), peers.text(3), f"{faster:.2f}"))
                result = {"kernel": kernel, "model": shapes.name, "shape": shape}
                results.append(result | {"ours_ms": us, "transformers_ms": peers, "times_faster": faster})
    settings = {"dtype": args.dtype, "clock": args.clock, "repeats": args.repeats}
    info = machine()
    print_machine(info | settings)
    print_table(("kernel", "model", "shape", "ours, ms", "transformers, ms", "times faster"), rows)
    print_json("kernels_cpu", machine=info, **settings, results=results)


if __name__ == "__main__":
    main()
