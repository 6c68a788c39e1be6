"""Batches equal transformers' own preparation, and a step of training runs."""

import multiprocessing
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3_5ForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from training import mixture
from training.cases import SKILLS, make_cases
from training.data import IGNORE, Encoder, collate, patchify
from training.fast import fast_forward
from training.losses import VisionHeads, answer_loss, vision_tokens
from training.mixture import Mixture
from training.model import demo_config, new_model
from training.optimizer import Optimizer
from training.tokenizer import train_tokenizer
from training.train import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(train_tokenizer(), (ROOT / "training" / "chat_template.jinja").read_text())


@pytest.fixture(scope="module")
def model(encoder: Encoder) -> Qwen3_5ForConditionalGeneration:
    config = demo_config(encoder.ids, encoder.tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=64, depth=1)
    return new_model(config, seed=0)


def test_patches_equal_the_image_processors():
    image = np.random.default_rng(0).integers(0, 256, (96, 128, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil.from_pretrained(ROOT / "assets" / "demo")
    expected = processor(images=[image], return_tensors="np")
    assert expected["image_grid_thw"].tolist() == [[1, 6, 8]]
    np.testing.assert_allclose(patchify(np.stack([image, image])[None]), expected["pixel_values"], atol=1e-6)


@pytest.mark.parametrize("kind", ["picture", "clip", "two", "text"])
def test_batches_have_transformers_positions_and_learn_every_answer(encoder: Encoder, model, kind: str):
    examples = mixture._examples(random.Random(kind), kind, 1.0, 600)
    batch = collate(encoder, examples)
    ids = batch["input_ids"]
    if "grid_thw" in batch:
        types = (ids == encoder.media_ids[0]).int() + 2 * (ids == encoder.media_ids[1]).int()
        grids = {"video_grid_thw" if kind == "clip" else "image_grid_thw": batch["grid_thw"]}
        expected, _ = model.model.get_rope_index(ids, types, **grids)
        length = (batch["labels"][0] != IGNORE).nonzero().max()
        assert torch.equal(batch["position_ids"][:, 0, :length], expected[:, 0, :length])
    answers = [m["content"] for e in examples for m in e.messages if m["role"] == "assistant"]
    assert len(answers) == len(batch["skills"])
    for number, answer in enumerate(answers):
        text = encoder.tokenizer.decode(batch["labels"][batch["answers"] == number].tolist())
        assert text.endswith(answer)


def test_fast_forward_equals_transformers(encoder: Encoder, model):
    batch = collate(encoder, mixture._examples(random.Random(1), "clip", 1.0, 400))
    with torch.no_grad():
        slow, _ = answer_loss(model, batch, vision_tokens(model, batch))
        with fast_forward():
            fast, _ = answer_loss(model, batch, vision_tokens(model, batch))
    torch.testing.assert_close(fast, slow, atol=1e-4, rtol=1e-4)


def test_a_few_steps_lower_the_loss(encoder: Encoder, model):
    progress = multiprocessing.Value("d", 1.9)
    batches = iter(Mixture(encoder, seed=0, progress=progress, tokens_per_batch=300))
    heads = VisionHeads(64)
    optimizer = Optimizer(model, heads, muon_lr=0.01, adam_lr=0.01, vision_rate=0.3)
    losses = []
    with fast_forward():
        batch = next(batches)
        for _ in range(8):
            tokens = vision_tokens(model, batch) if "pixels" in batch else None
            loss, _ = answer_loss(model, batch, tokens)
            loss.backward()
            optimizer.step(1.0)
            losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def _text(message) -> str:
    parts = message["content"]
    return parts if isinstance(parts, str) else "".join(part.get("text", "") for part in parts)


def test_cases_are_reproducible():
    for skill in SKILLS:
        first, second = (make_cases(skill, 1, "combos") for _ in range(2))
        # x264 writes other bytes for the same frames now and then: compare what is asked, not the files.
        texts = [[(c.skill, c.expected, [_text(m) for m in c.messages]) for c in cases] for cases in (first, second)]
        assert texts[0] == texts[1]


@pytest.mark.slow
def test_the_command_writes_a_checkpoint_and_resumes(tmp_path: Path):
    command = ["--minutes", "0.2", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--device", "cpu"]
    main([*command, "--tokens-per-batch", "300"])
    main([*command, "--resume"])
    Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "out")
