"""Conversations as ids, labels and pixels."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qwen35mm.assets import demo_model_path
from training.data import END_SPELL, IGNORE, SPELL, Encoder, collate, plain
from training.export import IMAGE_PROCESSOR, save_json
from training.fast import GAP
from training.media import patchify, pixel_values, to_know
from training.mixture import PARTS, realized


@pytest.mark.parametrize("kind", PARTS)
def test_every_answer_is_learned_and_nothing_else(encoder: Encoder, kind: str) -> None:
    samples = [PARTS[kind](random.Random(i), 0.5) for i in range(4)]
    encodeds = [encoder.encode(realized(sample)) for sample in samples]
    batch = collate(encoder, [encodeds], sum(len(each.ids) + GAP for each in encodeds))
    answers = []
    for sample in samples:
        said = [m for m in sample.messages if m["role"] == "assistant"]
        assert len(said) == len(sample.skills)
        answers += said
    assert batch["skills"] == [skill for sample in samples for skill in sample.skills]
    decode = encoder.tokenizer.decode
    for number, message in enumerate(answers):
        text = decode(batch["labels"][batch["answers"] == number].tolist(), skip_special_tokens=False)
        assert text.endswith("<|im_end|>")
        call = message.get("tool_calls")
        assert plain(message["content"]) in text
        assert not call or f"<function={call[0]['function']['name']}>" in text
        # A thought, empty or not, may stand before it; the question doesn't.
        assert text.count("<|im_end|>") == 1
        assert "<|im_start|>" not in text
    # A label is the next token of the same conversation.
    learned = (batch["labels"] != IGNORE).nonzero()
    for row, column in learned.tolist():
        assert batch["labels"][row, column] == batch["input_ids"][row, column + 1]
        assert batch["segments"][row, column] == batch["segments"][row, column + 1] > 0


@pytest.mark.parametrize(
    "kind", ["picture", "plain", "verdict", "relation", "box", "counts", "pictures", "repeat", "clip", "event"]
)
def test_no_answer_could_be_copied_from_one_before(kind: str) -> None:
    """Of several pictures, which one it is may be asked again: "The first picture." has another reason each time."""
    longest = 0
    for seed in range(60):
        sample = PARTS[kind](random.Random(seed), 0.5)
        said = [message["content"] for message in sample.messages if message["role"] == "assistant"]
        shown = [
            a for a, skill in zip(said, sample.skills, strict=True) if skill not in ("small talk", "which picture")
        ]
        assert len(set(shown)) == len(shown), shown
        longest = max(longest, len(shown))
    assert longest >= 3


def test_many_are_counted_behind_their_caption() -> None:
    """Three of a colour or kind, or more, in over two pictures of five; by chance in one of four."""
    many = 0
    for seed in range(200):
        sample = PARTS["counts"](random.Random(seed), 1.0)
        skills = [skill for skill in sample.skills if skill != "small talk"]
        assert skills == ["caption"] + ["count"] * (len(skills) - 1)
        contents = [message["content"] for message in sample.messages if not isinstance(message["content"], str)]
        (picture,) = (part["image"] for content in contents for part in content if part["type"] == "image")
        many += max(Counter(kind for i in picture.items for kind in (i.color, i.shape)).values()) > 2
    assert many > 80, many


@pytest.mark.parametrize(
    ("kind", "words"), [("verdict", ("Yes", "No")), ("pictures", (" first", " second", " third", " fourth"))]
)
def test_words_that_decide_weigh_more(encoder: Encoder, kind: str, words: tuple[str, ...]) -> None:
    # The bundled model's tokenizer: that of the tests has seen too little to know all of them.
    encoder = Encoder(Tokenizer.from_file(str(demo_model_path() / "tokenizer.json")), encoder.template)
    encodeds = [encoder.encode(realized(PARTS[kind](random.Random(i), 0.5))) for i in range(8)]
    batch = collate(encoder, [encodeds], sum(len(each.ids) + GAP for each in encodeds))
    labels, weights = batch["labels"], batch["weights"]
    verdicts = [encoder.encode_text(word) for word in words]
    assert all(len(each) == 1 for each in verdicts), "the tokenizer knows them"
    decides = torch.isin(labels, torch.tensor(verdicts).flatten())
    assert decides.sum() >= 5
    assert set(weights[decides].tolist()) == {6.0}
    others = (labels != IGNORE) & ~decides
    assert (weights[others] == 1).sum() > 50


def test_with_the_first_word_it_is_said_whether_it_was_told(encoder: Encoder) -> None:
    encodeds = [encoder.encode(realized(PARTS["told"](random.Random(i), 0.5))) for i in range(8)]
    batch = collate(encoder, [encodeds], sum(len(each.ids) + GAP for each in encodeds))
    assert {"recall", "not told"} <= set(batch["skills"])
    for number, skill in enumerate(batch["skills"]):
        here = batch["answers"] == number
        expected = encoder.weights[batch["labels"][here]]
        expected[0] *= 3.0 if skill in ("recall", "not told") else 1.0
        assert batch["weights"][here].tolist() == expected.tolist()


def test_what_is_known_of_each_token_lies_in_the_order_of_the_batchs_media(encoder: Encoder) -> None:
    encodeds = [encoder.encode(realized(PARTS[kind](random.Random(3), 0.5))) for kind in ("clip", "chat", "pictures")]
    batch = collate(encoder, [encodeds[:2], encodeds[2:]], 2560)
    found = [to_know(each.example.media) for each in encodeds if each.example.media]
    np.testing.assert_array_equal(batch["known"], np.concatenate(found))
    assert len(batch["known"]) == len(batch["targets"])


def test_what_is_read_is_spelled_letter_by_letter(encoder: Encoder) -> None:
    text = f'It says "{SPELL}triangle{END_SPELL}".'
    spelled, plain_ids = encoder.encode_text(text), encoder.encode_text(plain(text))
    assert encoder.tokenizer.decode(spelled) == encoder.tokenizer.decode(plain_ids) == 'It says "triangle".'
    letters = [encoder.encode_text(letter) for letter in "triangle"]
    assert all(len(each) == 1 for each in letters)
    start = spelled.index(letters[0][0], 3)
    assert spelled[start : start + 8] == [each[0] for each in letters]
    assert len(plain_ids) < len(spelled)


def test_thinking_is_on_where_there_is_a_thought(encoder: Encoder) -> None:
    sample = next(s for i in range(50) if (s := PARTS["thinking"](random.Random(i), 0.5)).thought)
    example = realized(sample)
    assert encoder.prompt(example).endswith("<|im_start|>assistant\n<think>\n")
    text = encoder.tokenizer.decode(encoder.encode(example).ids.tolist(), skip_special_tokens=False)
    assert text.endswith(f"<think>\n{sample.thought}\n</think>\n\n{sample.messages[-1]['content']}<|im_end|>")
    silent = realized(PARTS["chat"](random.Random(0), 0.5))
    assert encoder.prompt(silent).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_patches_equal_the_image_processors(tmp_path: Path) -> None:
    save_json(tmp_path / "preprocessor_config.json", IMAGE_PROCESSOR)
    image = np.random.default_rng(0).integers(0, 256, (256, 288, 3), dtype=np.uint8)
    expected = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)(images=[image], return_tensors="np")
    assert expected["image_grid_thw"].tolist() == [[1, 16, 18]]
    values = pixel_values(torch.from_numpy(patchify(image[None, None])))
    np.testing.assert_allclose(values, expected["pixel_values"], atol=1e-6)


def test_padding_is_nothing(encoder: Encoder) -> None:
    encoded = encoder.encode(realized(PARTS["chat"](random.Random(0), 0.5)))
    length = len(encoded.ids)
    batch = collate(encoder, [[encoded, encoded]], 2 * length + GAP + 7)
    segments = [1] * length + [0] * GAP + [2] * length + [0] * 7
    assert batch["segments"].tolist() == [segments]
    padding = torch.tensor([segments]) == 0
    assert bool((batch["labels"][padding] == IGNORE).all())
    assert set(batch["input_ids"][padding].tolist()) == {encoder.ids["<|endoftext|>"]}
