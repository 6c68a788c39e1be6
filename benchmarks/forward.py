"""The models as they are, without an engine around them: a prompt's prefill, tokens after it, the vision tower."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from typing import Any

import torch

from benchmarks.engines import TransformersPeer
from qwen35mm.cache import CachePools, SequenceCache
from qwen35mm.cache.kv_pool import DEFAULT_BLOCK_SIZE
from qwen35mm.config import ModelConfig, VisionConfig
from qwen35mm.contract import Progress, SamplingParams
from qwen35mm.engine import Engine, EngineSettings, Request
from qwen35mm.engine.batches import prefill_batch
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.settings import piece_tokens_at
from qwen35mm.engine.step_graph import StepGraph
from qwen35mm.model import load
from qwen35mm.model.load import DTYPES
from qwen35mm.prompt import Prompt, cut_segments

# Tokens before each sequence of a batch: they cost a batch nothing that its rows wouldn't each cost alone.
SLOT_TOKENS = 64


class Ours:
    """The model in a format of weights, its cache and its decode step."""

    def __init__(self, arguments: argparse.Namespace, weights: str) -> None:
        self._num_decoded, dtype = arguments.decode_tokens, DTYPES[arguments.dtype]
        loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device, weights=weights)
        self._loaded, self.model, self._config = loaded, loaded.model, loaded.config
        self._piece_tokens = EngineSettings().piece_tokens_on(self.model.device)
        num_slots = max([1, *arguments.slots])
        max_tokens = max(arguments.lengths) + self._num_decoded
        slot_tokens = SLOT_TOKENS + self._num_decoded
        num_tokens = max_tokens + num_slots * (slot_tokens + DEFAULT_BLOCK_SIZE)
        devices = self.model.layer_devices
        self._pools = CachePools(self._config, num_slots=num_slots, num_tokens=num_tokens, dtype=dtype, device=devices)
        # A slot that nobody was admitted to takes the likeliest token.
        sampler = Sampler(num_slots, self._config.text.vocab_size, [], self.model.head_device)
        max_blocks = self._pools.kv.blocks_for(max(max_tokens, slot_tokens))
        self._graphs = {
            size: StepGraph(self.model, self._pools, sampler, size, max_blocks) for size in {1, *arguments.slots}
        }

    def measure(self, length: int) -> dict[str, Any]:
        """Seconds of a prompt's prefill and of the tokens after it together, and this process's peak memory."""
        started_s = time.perf_counter()
        cache, token_id = self._prefill(random_ids(length))
        prefill_s = time.perf_counter() - started_s
        decode_s = self._decode([cache], [token_id])
        cache.free()
        return {"prefill_s": prefill_s, "decode_s": decode_s, "peak_bytes": peak_bytes(self.model.device)}

    def measure_slots(self, num_slots: int) -> dict[str, Any]:
        """Seconds of tokens of so many sequences in one batch."""
        caches, token_ids = zip(*(self._prefill(random_ids(SLOT_TOKENS)) for _ in range(num_slots)), strict=True)
        decode_s = self._decode(list(caches), list(token_ids))
        for cache in caches:
            cache.free()
        return {"decode_s": decode_s}

    def measure_steps(self, length: int) -> list[dict[str, Any]]:
        """The engine's steps of a prompt's prefill.

        Returns:
            Of each where it ended, its seconds, those of CPU time for each thread, and the peak memory until then.
        """
        segments, tail_start = cut_segments(length, (), ())
        positions = torch.arange(length).expand(3, -1).numpy().copy()
        prompt = Prompt(random_ids(length).numpy(), (), positions, 0, segments, tail_start)
        engine = Engine(self._loaded, EngineSettings(context_length=length + 1, slots=1))
        engine.add(Request(prompt, params=SamplingParams(temperature=0.0, max_tokens=1)))
        steps: list[dict[str, Any]] = []
        while engine.has_requests:
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            told = [output.event for output in engine.step()]
            step_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
            peak = peak_bytes(self.model.device)
            for event in told:
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, Progress) and event.phase == "prefill":
                    measured = {"step_s": step_s, "cpu_s": cpu_s / torch.get_num_threads(), "peak_bytes": peak}
                    steps.append({"stop": event.done, **measured})
        return steps

    def measure_tower(self, side: int) -> dict[str, Any]:
        """Seconds of a square picture of so many pixels a side in the vision tower."""
        pixels, grid = random_picture(self._config.vision, side)
        started_s = time.perf_counter()
        float(self.model.tower(pixels, grid)[-1, -1])
        return {"tower_s": time.perf_counter() - started_s}

    def _prefill(self, token_ids: torch.Tensor) -> tuple[SequenceCache, int]:
        cache = self._pools.new_sequence()
        positions = torch.arange(len(token_ids)).expand(3, -1)
        token_ids, positions = token_ids.to(self.model.device), positions.to(self.model.device)
        while cache.length < len(token_ids):
            stop = cache.length + piece_tokens_at(cache.length, self._piece_tokens, self.model.device)
            ids, places = token_ids[cache.length : stop], positions[:, cache.length : stop]
            cache.prepare(len(ids))
            hidden = self.model(prefill_batch(cache, self.model.embed_tokens(ids), places))
            cache.advance(len(ids))
        return cache, int(self.model.logits(hidden[-1:]).argmax())

    def _decode(self, caches: list[SequenceCache], token_ids: list[int]) -> float:
        """Seconds; on a GPU as the engine does: a step is launched before the one before is read."""
        graph, ahead = self._graphs[len(caches)], self.model.device.type != "cpu"
        started_s = time.perf_counter()
        for step in range(self._num_decoded):
            inputs = graph.inputs(step % 2)
            for row, cache in enumerate(caches):
                cache.prepare(1)
                inputs.set(row, cache, token_id=None if step and ahead else token_ids[row], step=step + 1)
            graph.run(step % 2)
            for cache in caches:
                cache.advance(1)
            if not ahead:
                token_ids = graph.token_ids(step % 2)
            elif step:
                graph.token_ids(1 - step % 2)
        graph.token_ids((self._num_decoded - 1) % 2)
        return time.perf_counter() - started_s


class Transformers(TransformersPeer):
    """The model's own forward, with its cache."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self._num_decoded = arguments.decode_tokens
        self._config = ModelConfig.from_pretrained(arguments.model)

    @torch.inference_mode()
    def measure(self, length: int) -> dict[str, Any]:
        """Like `Ours.measure`."""
        ids, past, seconds = random_ids(length)[None], None, []
        for _ in range(1 + self._num_decoded):
            started_s = time.perf_counter()
            output = self.hf_model(ids.to(self.device), past_key_values=past, use_cache=True, logits_to_keep=1)
            past, ids = output.past_key_values, torch.tensor([[int(output.logits[0, -1].argmax())]])
            seconds.append(time.perf_counter() - started_s)
        peak = peak_bytes(torch.device(self.device))
        return {"prefill_s": seconds[0], "decode_s": sum(seconds[1:]), "peak_bytes": peak}

    @torch.inference_mode()
    def measure_tower(self, side: int) -> dict[str, Any]:
        """Like `Ours.measure_tower`."""
        pixels, grid = random_picture(self._config.vision, side)
        started_s = time.perf_counter()
        features = self.hf_model.model.visual(
            pixels.to(self.device, self.hf_model.dtype), grid_thw=torch.tensor([grid], device=self.device)
        )
        float(features.pooler_output[-1, -1])
        return {"tower_s": time.perf_counter() - started_s}


def random_ids(length: int) -> torch.Tensor:
    return torch.randint(0, 900, (length,), generator=torch.Generator().manual_seed(length))


def random_picture(vision: VisionConfig, side: int) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Patches [P, patch_dim] float32 of a picture of `side` pixels a side, and its grid."""
    rows = side // vision.patch_size
    patches = torch.rand(rows * rows, vision.patch_dim, generator=torch.Generator().manual_seed(side))
    return patches * 2 - 1, (1, rows, rows)


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process so far: of the GPU where it runs on one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
