"""How trainers of image and video models read captions: from which file, and how many tokens.

Taken from each trainer's code, see `tests/captioning/texts/test_trainers.py`. Where a trainer leaves the choice to a
person (a suffix, a model), this is its default or its examples' choice.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import Tokenizer

from qwen35mm.captioning.texts.cleanup import is_list_of_tags, sentence_ends
from qwen35mm.errors import CaptioningError

SHORTENED = "shortened"
TOO_LONG = "too long"

_PIECES = re.compile(r"\w+|[^\w\s]")
_LETTERS_PER_TOKEN = 8
_TAG_ENDS = re.compile(r"\s*[,，、;；]")


@dataclass(frozen=True)
class Trainer:
    """How a trainer reads captions, from text files beside their media.

    Attributes:
        suffix: of its text files.
        encoder: the text encoder that counts the tokens, by its id on the Hub.
        max_tokens: the most tokens of a caption; the trainer drops the rest.
        separator: between a file's text and text that is added.
        several: the kind of output that it reads several captions of a medium from; `sidecar` if it reads only one.
    """

    suffix: str
    encoder: str
    max_tokens: int
    separator: str
    several: str = "sidecar"


_CLIP, _T5, _UMT5 = "openai/clip-vit-large-patch14", "google/t5-v1_1-xxl", "google/umt5-xxl"
_LLAMA = "hunyuanvideo-community/HunyuanVideo"
_QWEN25, _QWEN3, _GEMMA = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-4B", "google/gemma-3-12b-it"
TRAINERS: Mapping[str, Trainer] = MappingProxyType(
    {
        # One chunk of CLIP, since --max_token_length is empty by default.
        "sd-scripts": Trainer(".caption", _CLIP, 75, ", ", several="lines"),
        # The defaults of its interface.
        "kohya-sdxl": Trainer(".txt", _CLIP, 225, ", ", several="lines"),
        "flux": Trainer(".txt", _T5, 512, " "),
        "wan": Trainer(".txt", _UMT5, 512, " "),
        "hunyuan": Trainer(".txt", _LLAMA, 256, " "),
        "musubi": Trainer(".txt", _LLAMA, 256, " "),
        # All encoders read the same text: CLIP 75 tokens, T5 256 with its end in sd-scripts, 75 in OneTrainer.
        "sd3": Trainer(".txt", _T5, 255, " "),
        # 512 in OneTrainer and ai-toolkit, of which a template takes 5; musubi-tuner takes 1024.
        "qwen-image": Trainer(".txt", _QWEN25, 507, " "),
        # 512 in all, of which the chat template takes 8.
        "z-image": Trainer(".txt", _QWEN3, 504, " "),
        "wan2.2": Trainer(".txt", _UMT5, 512, " "),
        # 1024, of which the template's end takes 5.
        "hunyuan-1.5": Trainer(".txt", _QWEN25, 1019, " "),
        # 256 with T5's end.
        "ltx": Trainer(".txt", _T5, 255, " "),
        "ltx2": Trainer(".txt", _GEMMA, 1023, " "),
        # Its examples' models: Flux, and Wan.
        "ai-toolkit": Trainer(".txt", _T5, 511, " "),
        "diffusion-pipe": Trainer(".txt", _UMT5, 511, " ", several="diffusion-pipe"),
        "onetrainer": Trainer(".txt", _CLIP, 75, ", ", several="lines"),
    }
)
"""By the names of `--for`."""


@dataclass(frozen=True)
class Length:
    """The most tokens of a caption.

    Attributes:
        encoder: the text encoder's id on the Hub; None estimates the tokens, since its tokenizer isn't on this machine.
    """

    max_tokens: int
    encoder: str | None = None

    @classmethod
    def of(cls, trainer: Trainer, max_tokens: int | None = None) -> Length:
        """A trainer's limit, or `max_tokens` of its tokens. Downloads nothing."""
        known = _tokenizer(trainer.encoder) is not None
        return cls(max_tokens or trainer.max_tokens, trainer.encoder if known else None)

    def takes(self, text: str) -> bool:
        """Whether a text is within the limit."""
        return self.count(text) <= self.max_tokens

    def count(self, text: str) -> int:
        """A text's tokens, without the special tokens around it. Estimates are rather too high."""
        if self.encoder is None:
            return sum(_estimate(piece) for piece in _PIECES.findall(text))
        tokenizer = _tokenizer(self.encoder)
        if tokenizer is None:
            raise CaptioningError(f"The tokenizer of {self.encoder} was there, and is gone. Run again.")
        return len(tokenizer.encode(text, add_special_tokens=False).ids)


def trainer_named(name: str) -> Trainer:
    """Raises CaptioningError: there is no trainer of this name."""
    if name not in TRAINERS:
        raise CaptioningError(f"--for takes {', '.join(TRAINERS)}; got {name!r}.")
    return TRAINERS[name]


def shorter_texts(text: str) -> list[str]:
    """A caption without its last sentences, or a list without its last tags, the longest first."""
    ends = [match.start() for match in _TAG_ENDS.finditer(text)] if is_list_of_tags(text) else sentence_ends(text)
    return [text[:end] for end in reversed(ends) if end < len(text)]


def _estimate(piece: str) -> int:
    # Encoders that were trained on English split other scripts mostly into bytes.
    letters = len(piece) if piece.isascii() else _LETTERS_PER_TOKEN * len(piece.encode("utf-8", "replace")) // 2
    return 1 + (letters - 1) // _LETTERS_PER_TOKEN


@functools.lru_cache(maxsize=4)
def _tokenizer(encoder: str) -> Tokenizer | None:
    """The tokenizer of a model from the Hub's cache; None if its `tokenizer.json` isn't there."""
    from huggingface_hub import try_to_load_from_cache

    for name in ("tokenizer.json", "tokenizer/tokenizer.json"):
        if isinstance(path := try_to_load_from_cache(encoder, name), str):
            return Tokenizer.from_file(path)
    return None
