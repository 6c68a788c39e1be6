"""The engines as benchmarks ask them: our backend for one token, transformers, and any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.scripted_chat import ScriptedChat
from qwen35mm.backends.local import LocalBackend
from qwen35mm.contract import Event, Finished, Result, SamplingParams
from qwen35mm.model.load import DTYPES

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


def last_result(backend: LocalBackend, events: AsyncIterator[Event]) -> tuple[Result, float]:
    """Reads a stream to its end, and when that came, by `time.perf_counter`; then waits until the engine rests."""

    async def read() -> tuple[Result, float]:
        async for event in events:
            if isinstance(event, Finished):
                return event.result, time.perf_counter()
        raise AssertionError("a stream ends with Finished")

    found = asyncio.run(read())
    rest(backend)
    return found


def rest(backend: LocalBackend) -> None:
    if not backend.wait_idle(600):
        raise SystemExit("the engine doesn't come to rest")


@dataclass(frozen=True)
class PictureInputs:
    """A question about one picture, as transformers' model takes it.

    Attributes:
        ids: [T] int64.
        pixel_values: [P, patch_dim] float32.
        grid_thw: [1, 3] int64.
    """

    ids: torch.Tensor
    pixel_values: torch.Tensor
    grid_thw: torch.Tensor


class TransformersPeer:
    """transformers' own image processor, template, tokenizer and `generate`, fresh for every request.

    transformers could go on from a kept `past_key_values` only where the next prompt begins with exactly the tokens
    that are in it, and a hybrid model's recurrent states can't be cut back to where the two part. A chat's next prompt
    leaves out the generation prompt's thinking block, so that this is never the case: see `ScriptedChat.num_extending`.

    Args:
        pixel_bounds: least and most pixels of a picture; None takes the checkpoint's.
    """

    def __init__(self, arguments: argparse.Namespace, pixel_bounds: tuple[int, int] | None = None) -> None:
        model: Any = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=DTYPES[arguments.dtype])
        self.hf_model = model.to(arguments.device).eval()
        self.device = arguments.device
        size = {}
        if pixel_bounds is not None:
            size["size"] = {"shortest_edge": pixel_bounds[0], "longest_edge": pixel_bounds[1]}
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(arguments.model, **size)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model)

    def read(self, path: Path, question: str) -> PictureInputs:
        """Decodes a file and tokenizes a question about it, which is answered without thinking."""
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
        """The reply's tokens, greedy; and where it is one, the logits [vocab] that it was chosen from."""
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

    def operations(self) -> dict[str, str]:
        """The module that transformers takes each operation of a Gated DeltaNet layer from; its own is the slow way.

        {} where this version of transformers chooses otherwise than by the wrappers of its model file.
        """
        modeling = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
        found = {}
        for name in (
            "torch_chunk_gated_delta_rule",
            "torch_recurrent_gated_delta_rule",
            "causal_conv1d_fn",
            "causal_conv1d_update",
        ):
            function = getattr(modeling, name, None)
            while function is not None and name not in found:
                if inspect.isfunction(function):
                    chosen = inspect.getclosurevars(function).nonlocals.get("implementation")
                    if chosen is not None:
                        found[name.removeprefix("torch_")] = chosen.__module__
                        break
                function = getattr(function, "__wrapped__", None)
        return found


def print_operations(operations: dict[str, str]) -> None:
    """Says where transformers takes each operation from."""
    for operation, module in operations.items():
        print(f"transformers: {operation} from {module}")


class ServerPeer:
    """An OpenAI-compatible server (vLLM, SGLang, llama.cpp's llama-server, ...), streamed.

    Args:
        url: up to and without `/chat/completions`, such as `http://127.0.0.1:8000/v1`.
        model: the name that the server knows the model by.
    """

    def __init__(self, url: str, model: str) -> None:
        import httpx

        self._url = url.rstrip("/") + "/chat/completions"
        self._model = model
        self._client = httpx.Client(timeout=httpx.Timeout(3600.0, connect=10.0))

    def turn(self, chat: ScriptedChat, turn: int) -> dict[str, Any]:
        """Streams one token.

        The time is that of the first chunk with text; of the stream's end where the token made no text. Token counts
        are the server's own, None where it tells none.
        """
        body = {
            "model": self._model,
            "messages": chat.openai_messages(turn),
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": chat.thinking},
        }
        usage: dict[str, Any] = {}
        ttft_s = None
        started_s = time.perf_counter()
        with self._client.stream("POST", self._url, json=body) as response:
            if response.status_code != 200:
                text = response.read().decode(errors="replace")[:500]
                raise SystemExit(f"{self._url} answered {response.status_code}: {text}")
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                usage = chunk.get("usage") or usage
                if ttft_s is None and any(_has_text(choice.get("delta") or {}) for choice in chunk.get("choices", [])):
                    ttft_s = time.perf_counter() - started_s
        if ttft_s is None:
            ttft_s = time.perf_counter() - started_s
        details = usage.get("prompt_tokens_details") or {}
        return {
            "ttft_s": ttft_s,
            "num_prompt_tokens": usage.get("prompt_tokens"),
            "num_cached_tokens": details.get("cached_tokens"),
        }


def _has_text(delta: dict[str, Any]) -> bool:
    return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning"))
