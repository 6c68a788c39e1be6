"""What types of keys and values cost: bytes, tokens a second behind a long context, and distributions.

    python -m benchmarks.make_random --size 0.8B --out random-0.8B
    python -m benchmarks.kv_types --model random-0.8B --context 512,8192

Tokens of all types are decoded in turns, several times over; the median of a token's seconds counts. KL is that of the
next token's distribution from the one with the model's own type, over `--kl-tokens` tokens of a text behind each other:
of a random model it bounds nothing, but shows one type beside another at the family's real head size.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from benchmarks.forward import random_ids
from qwen35mm.assets import asset_path
from qwen35mm.cache import CachePools, SequenceCache
from qwen35mm.cache.kv_types import AUTO, kv_formats_of
from qwen35mm.cpu import set_num_threads
from qwen35mm.engine import EngineSettings
from qwen35mm.engine.batches import prefill_batch
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.step_graph import StepGraph
from qwen35mm.evaluation.passages import diverge, hidden_states, text_passages
from qwen35mm.model import LoadedModel, load

TYPES = ("f16", "fp8", "fp8_e5m2", "int8", "k=int8,v=int4", "int4")


class Decoding:
    """One sequence of a type behind a context, whose next tokens are decoded one by one.

    Attributes:
        prefill_speed: tokens a second of the context's last piece.
    """

    def __init__(self, loaded: LoadedModel, kv_dtype: str, context: int, num_tokens: int) -> None:
        model, config = loaded.model, loaded.config
        formats = kv_formats_of(kv_dtype, model.dtype)
        self.token_bytes = config.kv_bytes_per_token(*formats)
        num_places = context + num_tokens
        pools = CachePools(
            config,
            num_slots=1,
            num_tokens=num_places,
            dtype=model.dtype,
            device=model.layer_devices,
            kv_formats=formats,
        )
        self._cache: SequenceCache = pools.new_sequence()
        piece = EngineSettings().piece_tokens_on(model.device)
        past = max(context - piece, 0)
        self._cache.prepare(past)
        for pair in pools.kv.layers.values():
            for rows, format in zip(pair, formats, strict=True):
                # A context that nobody computed takes as long to read as another one.
                values = torch.randn(len(rows), config.text.num_key_value_heads, config.text.head_dim)
                rows.copy_(format.quantise(values))
        self._cache.advance(past)
        ids = random_ids(context - past).to(model.device)
        positions = torch.arange(past, context, device=model.device).expand(3, -1)
        self._cache.prepare(len(ids))
        # A card's first run compiles.
        for _ in range(1 if model.device.type == "cpu" else 2):
            started_s = time.perf_counter()
            with torch.inference_mode():
                model(prefill_batch(self._cache, model.embed_tokens(ids), positions)).sum().item()
            self.prefill_speed = len(ids) / (time.perf_counter() - started_s)
        self._cache.advance(len(ids))
        sampler = Sampler(1, config.text.vocab_size, [], model.head_device)
        self._graph = StepGraph(model, pools, sampler, 1, pools.kv.blocks_for(num_places))
        self.seconds: list[float] = []
        self.step()
        self.seconds.clear()  # the first is recorded

    def step(self) -> None:
        """Decodes a token, and notes how long that took."""
        started_s = time.perf_counter()
        inputs = self._graph.inputs(0)
        self._cache.prepare(1)
        inputs.set(0, self._cache, token_id=7, step=1)
        self._graph.run(0)
        self._cache.advance(1)
        self._graph.token_ids(0)
        self.seconds.append(time.perf_counter() - started_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--context", type=lambda text: [int(part) for part in text.split(",")], default=[512, 8192])
    parser.add_argument("--tokens", type=int, default=24, help="decoded of each type and context")
    parser.add_argument("--kl-tokens", type=int, default=1024, help="of the text; 0 leaves KL out")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    set_num_threads(arguments.threads)
    loaded = load(arguments.model, dtype="bfloat16", device=arguments.device, weights=arguments.weights)
    kl = distances(loaded, arguments.types, arguments.kl_tokens) if arguments.kl_tokens else {}
    print(f"{'context':>8}  {'type':<16}{'B/token':>8}{'prefill tok/s':>15}{'decode tok/s':>14}{'of own':>8}{'KL':>10}")
    for context in arguments.context:
        runs = {name: Decoding(loaded, name, context, arguments.tokens + 1) for name in (AUTO, *arguments.types)}
        for _ in range(arguments.tokens):
            for run in runs.values():
                run.step()
        own_s = statistics.median(runs[AUTO].seconds)
        for name, run in runs.items():
            step_s = statistics.median(run.seconds)
            speeds = f"{run.prefill_speed:>15.1f}{1 / step_s:>14.2f}{own_s / step_s:>8.2f}"
            print(f"{context:>8}  {name:<16}{run.token_bytes:>8}{speeds}{kl.get(name, 0):>10.5f}", flush=True)


def distances(loaded: LoadedModel, types: list[str], num_tokens: int) -> dict[str, float]:
    """Of each type the mean KL from the model's own."""
    passages = text_passages(loaded, asset_path("evaluation.txt").read_text("utf-8"), num_tokens)
    head, own = loaded.model.head, list(hidden_states(loaded, passages))
    return {
        name: diverge(passages, (head, own), (head, list(hidden_states(loaded, passages, name)))).kl_mean
        for name in types
    }


if __name__ == "__main__":
    main()
