"""The demo's tokenizer: byte-level BPE with the family's regex, normaliser and special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 1280

# Order and `special` flags as in the family's own tokenizers: template markup is special, tags that a reply
# may contain are not.
ADDED_TOKENS = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
)

PRETOKENIZE_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_TEMPLATE_WORDS = "system\nuser\nassistant\n\n\n<0.5 seconds><12.3 seconds> Picture 1: Video 2: "
_ENGLISH = (
    "The quick brown fox jumps over the lazy dog. This is a test of the model, and it should work for any text "
    "that people write here. Could you please tell me more about that? I would like to know why there are not "
    "any other things in it. They have been there before, but now we can see them from the other side of the street. "
    "She said that he was going to make some of these with her own hands. What would you do if you were me? "
    "function name parameter value string object type description required properties integer number boolean "
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Trains the BPE merges on these texts and some English; any UTF-8 text encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ADDED_TOKENS),
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([*texts, *[_TEMPLATE_WORDS, _ENGLISH] * 20], trainer)
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in ADDED_TOKENS])
    return tokenizer


def token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The id of every added token."""
    vocab = tokenizer.get_vocab()
    return {text: vocab[text] for text, _ in ADDED_TOKENS}


def save_tokenizer(tokenizer: Tokenizer, folder: Path, model_max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json; the chat template is a file of its own."""
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = token_ids(tokenizer)
    config: dict[str, Any] = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(ids[text]): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": special,
            }
            for text, special in ADDED_TOKENS
        },
        "additional_special_tokens": [text for text, special in ADDED_TOKENS[1:] if special],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "image_token": "<|image_pad|>",
        "model_max_length": model_max_length,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
