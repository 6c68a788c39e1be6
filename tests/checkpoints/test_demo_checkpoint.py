"""The bundled checkpoint is in the real layout, small, and loads in transformers."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, Qwen3_5ForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

DEMO = Path(__file__).parents[2] / "assets" / "demo"
SAMPLES = DEMO.parent / "samples"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|video_pad|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def test_folder_is_complete_and_at_most_16_mb():
    names = {path.name for path in DEMO.iterdir()}
    assert names >= {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
    }
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 16 * 2**20


def test_loads_in_transformers(tokenizer):
    loaded: Any = Qwen3_5ForConditionalGeneration.from_pretrained(DEMO, output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    config = model.config
    assert config.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert config.video_token_id == tokenizer.convert_tokens_to_ids("<|video_pad|>")
    assert len(tokenizer) == config.text_config.vocab_size
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    processor = Qwen2VLImageProcessorPil.from_pretrained(DEMO)
    assert (processor.patch_size, processor.merge_size, list(processor.image_mean)) == (16, 2, [0.5] * 3)


def test_special_tokens_are_single_ids_with_the_familys_flags(tokenizer):
    for text in (*SPECIAL, *TAGS):
        assert len(tokenizer(text)["input_ids"]) == 1, text
    decoder = json.loads((DEMO / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    flags = {entry["content"]: entry["special"] for entry in decoder.values()}
    assert all(flags[text] for text in SPECIAL)
    assert not any(flags[text] for text in TAGS)


def test_any_text_comes_back(tokenizer):
    rng = random.Random(0)
    texts = ["A red circle.\r\n\tok ", "naïve 漢字 🙂 \x00 \u200d", *("".join(_random_chars(rng)) for _ in range(50))]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == tokenizer.backend_tokenizer.normalizer.normalize_str(text)


def _random_chars(rng: random.Random) -> list[str]:
    points = (rng.choice((rng.randrange(128), rng.randrange(sys.maxunicode))) for _ in range(20))
    return [chr(p) for p in points if not 0xD800 <= p < 0xE000]


def test_template_defaults_to_no_thinking(tokenizer):
    def render(messages, **options) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " What? "}]}]
    start = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|> What?<|im_end|>\n"
    answered = [*question, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}]
    closed, opened = "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_start|>assistant\n<think>\n"
    assert render(question, add_generation_prompt=True) == start + closed
    assert render(question, add_generation_prompt=True, enable_thinking=True) == start + opened
    assert render(answered) == start + "<|im_start|>assistant\n<think>\nhm\n</think>\n\nyes<|im_end|>\n"
    next_turn = render([*answered, {"role": "user", "content": "why"}])
    assert next_turn == start + "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n"
    assert render(question, add_vision_id=True).startswith("<|im_start|>user\nPicture 1: <|vision_start|>")


def test_template_renders_tools_and_refuses_media_in_the_system_turn(tokenizer):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": [1, 2], "c": "x"}}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, tools=tools)
    parameters = "<parameter=a>\n1\n</parameter>\n<parameter=b>\n[1, 2]\n</parameter>\n<parameter=c>\nx\n</parameter>\n"
    rendered = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    assert f"</think>\n\n{rendered}\n{rendered}<|im_end|>\n" in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    )
    assert text.startswith("<|im_start|>system\n# Tools")
    with pytest.raises(Exception, match="cannot hold images"):
        tokenizer.apply_chat_template(
            [{"role": "system", "content": [{"type": "image"}]}, {"role": "user", "content": "x"}], tokenize=False
        )


def test_samples_are_listed_and_small():
    entries = json.loads((SAMPLES / "samples.json").read_text())
    assert {entry["file"] for entry in entries} == {p.name for p in SAMPLES.iterdir() if p.suffix != ".json"}
    assert {entry["kind"] for entry in entries} == {"image", "video"}
    assert sum(path.stat().st_size for path in SAMPLES.iterdir()) < 2**20
