"""The peers: transformers on text and pictures, and llama.cpp's llama-bench on a GGUF."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qwen35mm.backends.local import LocalBackend
from qwen35mm.checkpoints.gguf_files import GgufFile
from qwen35mm.checkpoints.tensor_names import EMBEDDING, LM_HEAD
from qwen35mm.config import ModelConfig
from qwen35mm.contract import Event, Finished, Result, SamplingParams
from qwen35mm.model.load import DTYPES
from qwen35mm.model.weights import share_read

TRANSFORMERS, LLAMA_CPP = "transformers", "llama.cpp"
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
_OPERATIONS = (
    *("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update"),
)
_POLL_S = 0.1


def add_options(options: argparse.ArgumentParser, program: str) -> None:
    """Adds `--peer` for transformers and llama.cpp, and options for llama.cpp's `program`."""
    peers = {"choices": [TRANSFORMERS, LLAMA_CPP], "action": "append", "default": []}
    options.add_argument("--peer", **peers, help="measure this one as well")
    options.add_argument(f"--{program}", dest="program", type=Path, metavar="BIN", help="llama.cpp's program")
    options.add_argument("--gguf", type=Path, action="append", default=[], metavar="FILE", help="llama.cpp's model")


def check_options(options: argparse.ArgumentParser, arguments: argparse.Namespace, program: str) -> None:
    """Ends the program if these options are incomplete."""
    if (LLAMA_CPP in arguments.peer) != bool(arguments.gguf and arguments.program):
        options.error(f"--peer llama.cpp, --{program} and --gguf go together")
    for path in [*arguments.gguf, *filter(None, [arguments.program])]:
        if not path.is_file():
            options.error(f"{path} is no file")


def last_result(backend: LocalBackend, events: AsyncIterator[Event]) -> tuple[Result, float]:
    """A stream's result and its time by `time.perf_counter`. Waits until the engine is idle."""

    async def read() -> tuple[Result, float]:
        async for event in events:
            if isinstance(event, Finished):
                return event.result, time.perf_counter()
        raise AssertionError("a stream ends with Finished")

    found = asyncio.run(read())
    wait_idle(backend)
    return found


def wait_idle(backend: LocalBackend) -> None:
    if not backend.wait_idle(600):
        raise SystemExit("the engine is still busy after ten minutes")


def random_ids(length: int) -> torch.Tensor:
    """Token ids [length] int64."""
    return torch.randint(0, 900, (length,), generator=torch.Generator().manual_seed(length))


def peak_bytes(device: torch.device) -> int:
    """This process's peak memory: the GPU's if the model is on one, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True)
class PictureInputs:
    """A question about one picture for transformers' model.

    Attributes:
        ids: [T] int64.
        pixel_values: [P, patch_dim] float32.
        grid_thw: [1, 3] int64.
    """

    ids: torch.Tensor
    pixel_values: torch.Tensor
    grid_thw: torch.Tensor


class Transformers:
    """transformers' own image processor, template, tokenizer, forward and `generate`.

    Every request starts without a cache. transformers can reuse a cache only if the next prompt begins with exactly the
    cached tokens, and the recurrent states of a hybrid model can't be cut back. A chat's next prompt leaves out the
    generation prompt's thinking block, so it never begins like that: see `multi_turn.ScriptedChat.num_extending`.

    Args:
        pixel_bounds: least and most pixels of a picture; None uses the checkpoint's.
    """

    def __init__(self, arguments: argparse.Namespace, pixel_bounds: tuple[int, int] | None = None) -> None:
        model: Any = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=DTYPES[arguments.dtype])
        self.hf_model = model.to(arguments.device).eval()
        self.device = arguments.device
        self.arguments = arguments
        size: dict[str, Any] = {}
        if pixel_bounds is not None:
            size["size"] = {"shortest_edge": pixel_bounds[0], "longest_edge": pixel_bounds[1]}
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(arguments.model, **size)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model)

    def read(self, path: Path, question: str) -> PictureInputs:
        """Decodes a file and tokenizes a question about it, without thinking."""
        with Image.open(path) as image:
            values = self._processor(images=[image.convert("RGB")], return_tensors="pt")
        grid = values["image_grid_thw"]
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        num_places = int(grid.prod()) // self._processor.merge_size**2
        text = re.sub(r"<\|image_pad\|>", "<|image_pad|>" * num_places, text)
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"][0]
        return PictureInputs(ids, values["pixel_values"], grid)

    def generate(self, inputs: PictureInputs, max_tokens: int) -> tuple[list[int], torch.Tensor | None]:
        """The tokens of the greedy reply; for a single token also its logits [vocab]."""
        ids = inputs.ids[None].to(self.device)
        output = self.hf_model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == self.hf_model.config.image_token_id).int(),
            pixel_values=inputs.pixel_values.to(self.device, self.hf_model.dtype),
            image_grid_thw=inputs.grid_thw.to(self.device),
            do_sample=False,
            max_new_tokens=max_tokens,
            return_dict_in_generate=True,
            output_logits=max_tokens == 1,
        )
        return output.sequences[0, len(inputs.ids) :].tolist(), output.logits[0][0] if output.logits else None

    @torch.inference_mode()
    def measure(self, length: int) -> dict[str, Any]:
        """Seconds for a prompt's prefill and for `decode_tokens` after it, with the model's forward."""
        ids, past, seconds = random_ids(length)[None], None, []
        for _ in range(1 + self.arguments.decode_tokens):
            started_s = time.perf_counter()
            output = self.hf_model(ids.to(self.device), past_key_values=past, use_cache=True, logits_to_keep=1)
            past, ids = output.past_key_values, torch.tensor([[int(output.logits[0, -1].argmax())]])
            seconds.append(time.perf_counter() - started_s)
        peak = peak_bytes(torch.device(self.device))
        return {"prefill_s": seconds[0], "decode_s": sum(seconds[1:]), "peak_bytes": peak}

    def operations(self) -> str:
        """The module from which transformers takes each operation of a Gated DeltaNet layer; its own is the slow one.

        Empty if this version of transformers chooses in another way.
        """
        modeling = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
        found = {}
        for name in _OPERATIONS:
            function = getattr(modeling, name, None)
            while function is not None and name not in found:
                if inspect.isfunction(function):
                    chosen = inspect.getclosurevars(function).nonlocals.get("implementation")
                    if chosen is not None:
                        found[name] = chosen.__module__
                function = getattr(function, "__wrapped__", None)
        return "\n".join(f"transformers: {name} from {module}" for name, module in found.items())


class LlamaCpp:
    """llama-bench on one GGUF. It warms up by itself, with as many tokens as it measures."""

    # Its default types for keys and values, and for a convolution's inputs.
    KV_DTYPE, CONV_DTYPE = torch.float16, torch.float32

    def __init__(self, arguments: argparse.Namespace, gguf: Path) -> None:
        self._command = [str(arguments.program), "--model", str(gguf), "--threads", str(torch.get_num_threads())]
        self._num_decoded = arguments.decode_tokens

    def measure(self, length: int) -> dict[str, Any]:
        """Seconds for a prompt's prefill and for the tokens after it, and peak resident memory."""
        prefill, prefill_bytes = self._run("--n-prompt", str(length), "--n-gen", "0")
        decode, decode_bytes = self._run("--n-prompt", "0", "--n-gen", str(self._num_decoded), "--n-depth", str(length))
        peak = max(prefill_bytes, decode_bytes)
        return {"prefill_s": prefill["avg_ns"] / 1e9, "decode_s": decode["avg_ns"] / 1e9, "peak_bytes": peak}

    def _run(self, *options: str) -> tuple[dict[str, Any], int]:
        command = [*self._command, *options, "--repetitions", "1", "--output", "json"]
        # A pipe without a reader would block the process.
        with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as output:
            process = subprocess.Popen(command, stdout=output, stderr=errors, stdin=subprocess.DEVNULL)
            peak = 0
            while process.poll() is None:
                peak = max(peak, _resident_bytes(process.pid))
                time.sleep(_POLL_S)
            output.seek(0)
            errors.seek(0)
            if process.returncode != 0:
                words = errors.read().decode(errors="replace")[-2000:]
                raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}:\n{words}")
            (test,) = json.load(output)
        return test, peak


def _resident_bytes(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def gguf_bytes_read(config: ModelConfig, path: Path) -> float:
    """Bytes of a GGUF's weights that decoding a token reads."""
    tables = {"token_embd.weight": EMBEDDING, "output.weight": LM_HEAD}
    tensors = GgufFile(path).tensors
    named = {tables.get(name, name.replace("_exps.", ".experts.")): tensors[name].stored.num_bytes for name in tensors}
    return sum(share_read(config, name, LM_HEAD in named) * size for name, size in named.items())
