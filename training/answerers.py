"""Who answers the evaluation's cases: transformers, or this project's own engine. Both greedily, without thinking."""

from __future__ import annotations

import asyncio
import io
from collections import defaultdict
from pathlib import Path
from typing import Any, Protocol

import av
import numpy as np
import torch
from PIL import Image
from tqdm import tqdm
from transformers import AutoTokenizer, Qwen3_5ForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from training.cases import Case
from training.data import Encoder, Example, Media, image_grid, num_sampled_frames, patchify, video_grid

MAX_NEW_TOKENS = 64
BATCH = 48


class Backend(Protocol):
    def answers(self, cases: list[Case]) -> list[str]:
        """The greedy answer of every case."""
        ...


class TransformersBackend:
    """transformers' own class, image processor and generate; prompts of one length run as one batch."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.model: Any = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.encoder = Encoder(self.tokenizer.backend_tokenizer, self.tokenizer.chat_template)

    def answers(self, cases: list[Case]) -> list[str]:
        prompts = [self._prompt(case) for case in cases]
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, (ids, _, _) in enumerate(prompts):
            by_length[len(ids)].append(index)
        answers = [""] * len(cases)
        groups = [each[i : i + BATCH] for each in by_length.values() for i in range(0, len(each), BATCH)]
        for group in tqdm(groups, unit="batch"):
            for index, answer in zip(group, self._generate([prompts[i] for i in group]), strict=True):
                answers[index] = answer
        return answers

    def _prompt(self, case: Case) -> tuple[list[int], list[Media], list[torch.Tensor]]:
        """Token ids, media and their pixel values in prompt order."""
        media, pixels = [], []
        for message in case.messages:
            for part in message["content"] if isinstance(message["content"], list) else []:
                if part["type"] == "text":
                    continue
                medium, values = self._image(part["image"]) if "image" in part else self._video(part["video"])
                media.append(medium)
                pixels.append(values)
        text = self.encoder.prompt(Example(case.messages, [case.skill], media), think=False)
        return self.tokenizer(text)["input_ids"], media, pixels

    def _image(self, file: bytes) -> tuple[Media, torch.Tensor]:
        image = Image.open(io.BytesIO(file)).convert("RGB")
        values = self.processor(images=[image], return_tensors="pt")
        height, width = image_grid(image.size)
        assert values["image_grid_thw"].tolist() == [[1, height // 16, width // 16]]
        return Media(np.empty((1, 2, height, width, 0)), None, []), values["pixel_values"]

    def _video(self, file: bytes) -> tuple[Media, torch.Tensor]:
        """Frames resized by Pillow: the video processor's own resize needs torchvision."""
        images, times_s = _sampled_frames(file)
        height, width = video_grid(images[0].size, len(images))
        if len(images) % 2:
            images, times_s = [*images, images[-1]], [*times_s, times_s[-1]]
        frames = [np.asarray(image.resize((width, height), Image.Resampling.BICUBIC)) for image in images]
        spans = np.stack(frames).reshape(-1, 2, height, width, 3)
        times = [(a + b) / 2 for a, b in zip(times_s[::2], times_s[1::2], strict=True)]
        return Media(spans, times, []), torch.from_numpy(patchify(spans))

    @torch.inference_mode()
    def _generate(self, prompts: list[tuple[list[int], list[Media], list[torch.Tensor]]]) -> list[str]:
        input_ids = torch.tensor([ids for ids, _, _ in prompts])
        config = self.model.config
        types = (input_ids == config.image_token_id).int() + 2 * (input_ids == config.video_token_id).int()
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "mm_token_type_ids": types,
        }
        flat = [(m, p) for _, media, pixels in prompts for m, p in zip(media, pixels, strict=True)]
        for kind, suffix in (("image", ""), ("video", "_videos")):
            chosen = [(m, p) for m, p in flat if (m.times_s is None) == (kind == "image")]
            if chosen:
                shapes = [m.frames.shape for m, _ in chosen]
                inputs[f"pixel_values{suffix}"] = torch.cat([p for _, p in chosen])
                inputs[f"{kind}_grid_thw"] = torch.tensor([[s[0], s[2] // 16, s[3] // 16] for s in shapes])
        output = self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        return self.tokenizer.batch_decode(output[:, input_ids.shape[1] :], skip_special_tokens=True)


class EngineBackend:
    """qwen35mm's own engine."""

    def __init__(self, folder: Path) -> None:
        from qwen35mm import LocalBackend

        self.backend = LocalBackend.load(folder, dtype="float32", device="cpu")

    def answers(self, cases: list[Case]) -> list[str]:
        from qwen35mm.evaluation.skills import answers, to_messages

        return asyncio.run(answers(self.backend, [to_messages(case.messages) for case in cases]))


def _sampled_frames(file: bytes) -> tuple[list[Image.Image], list[float]]:
    """The frames, with times, that the video processor would take from a file of constant rate."""
    with av.open(io.BytesIO(file)) as container:
        rate = container.streams.video[0].average_rate
        assert rate is not None, "our own files state their rate"
        images = [frame.to_image() for frame in container.decode(video=0)]
    fps = float(rate)
    count = num_sampled_frames(len(images) / fps, fps)
    indices = np.linspace(0, len(images) - 1, count).round().astype(int)
    return [images[i] for i in indices], [float(i) / fps for i in indices]


BACKENDS = {"transformers": TransformersBackend, "qwen35mm": EngineBackend}
