"""The cost of types of keys and values: bytes, speed after a long context, and divergence.

    python -m benchmarks.make_random --size 0.8B --out random-0.8B
    python -m benchmarks.kv_types --model random-0.8B --context 512,8192

KL is the divergence of the next token's distribution from that with the model's own type, over the first `--kl-tokens`
tokens of a text. On a random model it only compares the types. A type with a share, such as `auto:0.5`, keeps the keys
and values of that share of the context.
"""

from __future__ import annotations

import time

import torch

from benchmarks.frame import Rows, Spread, numbers, parse, parser, report
from benchmarks.peers import random_ids
from qwen35mm.assets import asset_path
from qwen35mm.cache import CachePools, SequenceCache
from qwen35mm.cache.kv_keep import KVKeep
from qwen35mm.cache.kv_types import AUTO, kv_formats_of
from qwen35mm.engine import EngineSettings
from qwen35mm.engine.pieces import Pieces
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.settings import chunk_tokens_at
from qwen35mm.engine.step_graph import StepGraph
from qwen35mm.evaluation.passages import diverge, hidden_states, text_passages
from qwen35mm.model import LoadedModel, load

TYPES = ("f16", "fp8", "fp8_e5m2", "int8", "k=int8,v=int4", "int4")


class Decoding:
    """A sequence after a context, with keys and values of one type.

    Attributes:
        prefill_speed: tokens a second of the context's last chunk.
    """

    def __init__(self, loaded: LoadedModel, name: str, context: int, num_tokens: int) -> None:
        model, config = loaded.model, loaded.config
        kv_dtype, kept = _type(name)
        context = KVKeep.of(kept).kept(context, 0)[0]
        formats, num_places = kv_formats_of(kv_dtype, model.dtype), context + num_tokens
        self.token_bytes = round(config.kv_bytes_per_token(*formats) * float(kept))
        sizes = {"num_slots": 1, "num_tokens": num_places, "dtype": model.dtype, "device": model.layer_devices}
        pools = CachePools(config, **sizes, kv_formats=formats)
        self._cache: SequenceCache = pools.new_sequence()
        chunk_tokens = chunk_tokens_at(context, EngineSettings().chunk_tokens_on(model.device), model.device)
        past = max(context - chunk_tokens, 0)
        self._cache.prepare(past)
        for pair in pools.kv.layers.values():
            for rows, format in zip(pair, formats, strict=True):
                # Random keys and values take as long to read as real ones.
                values = torch.randn(len(rows), config.text.num_key_value_heads, config.text.head_dim)
                rows.copy_(format.quantise(values))
        self._cache.advance(past)
        ids, positions = random_ids(context - past), torch.arange(past, context).expand(3, -1)
        pieces = Pieces(model, pools, num_places, len(ids))
        self._cache.prepare(len(ids))
        # On a GPU the first run compiles.
        for _ in range(1 if model.device.type == "cpu" else 2):
            started_s = time.perf_counter()
            with torch.inference_mode():
                pieces.run(self._cache, ids, positions).sum().item()
            self.prefill_speed = len(ids) / (time.perf_counter() - started_s)
        self._cache.advance(len(ids))
        sampler = Sampler(1, config.text.vocab_size, [], model.head_device)
        self._graph = StepGraph(model, pools, sampler, 1, pools.kv.blocks_for(num_places))
        self.seconds: list[float] = []
        self.step()
        self.seconds.clear()  # the first step records the graph

    def step(self) -> None:
        """Decodes a token and records its seconds."""
        started_s = time.perf_counter()
        self._cache.prepare(1)
        self._graph.inputs(0).set(0, self._cache, token_id=7, step=1)
        self._graph.run(0)
        self._cache.advance(1)
        self._graph.token_ids(0)
        self.seconds.append(time.perf_counter() - started_s)


def measure(loaded: LoadedModel, types: list[str], context: int, num_tokens: int, kl: dict[str, float]) -> Rows:
    """A row for each type, after one context. The types alternate with every token."""
    runs = {name: Decoding(loaded, name, context, num_tokens + 1) for name in (AUTO, *types)}
    for _ in range(num_tokens):
        for run in runs.values():
            run.step()
    rows: Rows = []
    speeds = {name: Spread.of(1 / each for each in run.seconds) for name, run in runs.items()}
    for name, run in runs.items():
        row = {"context": context, "type": name, "bytes a token": run.token_bytes, "prefill, tok/s": run.prefill_speed}
        row |= {"decode, tok/s": speeds[name], "of own type": speeds[name].median / speeds[AUTO].median}
        rows.append({**row, "KL": kl.get(name)})
    return rows


def distances(loaded: LoadedModel, types: list[str], num_tokens: int) -> dict[str, float]:
    """Each type's mean KL from the model's own type."""
    passages = text_passages(loaded, asset_path("evaluation.txt").read_text("utf-8"), num_tokens)
    head, own = loaded.model.head, list(hidden_states(loaded, passages))
    return {
        name: diverge(passages, (head, own), (head, list(hidden_states(loaded, passages, *_type(name))))).kl_mean
        for name in types
    }


def _type(name: str) -> tuple[str, str]:
    """A type, and the share that is kept."""
    kv_dtype, _, kept = name.partition(":")
    return kv_dtype, kept or "1"


def main() -> None:
    options = parser(__doc__, repeats=None)
    options.add_argument("--weights", default="auto")
    options.add_argument("--types", nargs="+", default=TYPES)
    options.add_argument("--context", type=numbers, default=[512, 8192])
    options.add_argument("--tokens", type=int, default=24, help="decoded with each type and context")
    options.add_argument("--kl-tokens", type=int, default=1024, help="of the text; 0 leaves KL out")
    arguments = parse(options)
    loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device, weights=arguments.weights)
    kl = distances(loaded, arguments.types, arguments.kl_tokens) if arguments.kl_tokens else {}
    contexts = (measure(loaded, arguments.types, each, arguments.tokens, kl) for each in arguments.context)
    report("kv_types", arguments, {"Keys and values": [row for rows in contexts for row in rows]})


if __name__ == "__main__":
    main()
