"""Turns conversations into batches: token ids, labels, M-RoPE positions and pixel patches, packed into rows.

Conversations lie one behind the other in rows of one length, `fast.GAP` zeros apart; `segments` says which is which.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from typing import Any

import jinja2
import numpy as np
import torch
from tokenizers import Tokenizer

from qwen35mm.evaluation.language import NUMBERS
from training.fast import GAP
from training.media import Media, to_know, vision_batch
from training.tokenizer import token_ids

IGNORE = -100
# Around what an answer spells letter by letter: what is read in a picture has no tokens of its own.
SPELL, END_SPELL = "\ue000", "\ue001"
SPELLED = re.compile(f"{SPELL}(.*?){END_SPELL}", re.DOTALL)
# How much a token counts that all after it follow from: else what follows is learned, and "No" is what is always said.
DECIDING = (
    dict.fromkeys(("Yes", "No", " first", " second", " third", " fourth"), 6.0)
    | {" an": 3.0}
    | {f" {number}": 3.0 for number in NUMBERS}
)
# How much an answer's first token counts: with it is said whether anything was told at all.
FIRST = {"recall": 3.0, "not told": 3.0}
_MEDIUM = re.compile(r"<\|vision_start\|><\|(image|video)_pad\|><\|vision_end\|>")


@dataclass
class Example:
    """A conversation that ends with the answer to be learned; `skills` has one name per assistant turn.

    `media` are those of the messages, in order. With `thought`, thinking is on and the answer begins with it.
    """

    messages: list[dict[str, Any]]
    skills: list[str]
    media: list[Media] = field(default_factory=list)
    thought: str | None = None
    tools: list[dict[str, Any]] | None = None


@dataclass
class Encoded:
    """`ids` [T]; `answers` [T]: the number of the assistant turn where a token is to be learned, else -1."""

    ids: np.ndarray
    answers: np.ndarray
    positions: np.ndarray  # [3, T]
    example: Example


def plain(text: str) -> str:
    """The text as a person reads it, without the marks of what is spelled."""
    return text.replace(SPELL, "").replace(END_SPELL, "")


def call_text(call: dict[str, Any]) -> str:
    """A tool call as the family writes it; `call` has a name and arguments."""
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in call["arguments"].items())
    return f"<tool_call>\n<function={call['name']}>\n{parameters}</function>\n</tool_call>"


def mrope_positions(ids: np.ndarray, media_ids: tuple[int, int], grids: list[tuple[int, int]]) -> np.ndarray:
    """M-RoPE positions [3, T]; `grids` are (rows, columns) of the spans in order. As transformers' get_rope_index."""
    positions = np.empty((3, len(ids)), dtype=np.int64)
    is_media = _is_media(ids, media_ids)
    remaining = iter(grids)
    index = position = 0
    while index < len(ids):
        if not is_media[index]:
            run = int(np.argmax(is_media[index:])) or len(ids) - index
            positions[:, index : index + run] = np.arange(position, position + run)
            index, position = index + run, position + run
            continue
        rows, columns = next(remaining)
        span = positions[:, index : index + rows * columns]
        span[0] = position
        span[1] = position + np.repeat(np.arange(rows), columns)
        span[2] = position + np.tile(np.arange(columns), rows)
        index, position = index + rows * columns, position + max(rows, columns)
    return positions


def _is_media(ids: np.ndarray, media_ids: tuple[int, int]) -> np.ndarray:
    return (ids == media_ids[0]) | (ids == media_ids[1])


class Encoder:
    """Renders an example with the checkpoint's own template and tokenizes it."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.ids = token_ids(tokenizer)
        self.media_ids = (self.ids["<|image_pad|>"], self.ids["<|video_pad|>"])
        self.answer_start = self.encode_text("<|im_start|>assistant\n")
        self.weights = np.ones(tokenizer.get_vocab_size(), dtype=np.float32)
        for word, weight in DECIDING.items():
            tokens = tokenizer.encode(word).ids
            if len(tokens) == 1:
                self.weights[tokens[0]] = weight
        self._letters: dict[str, list[int]] = {}

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text, with what stands between the marks spelled letter by letter."""
        parts = SPELLED.split(text)
        if len(parts) == 1:
            return self.tokenizer.encode(text).ids
        ids: list[int] = []
        for index, part in enumerate(parts):
            if index % 2:
                for letter in part:
                    if letter not in self._letters:
                        self._letters[letter] = self.tokenizer.encode(letter).ids
                    ids += self._letters[letter]
            elif part:
                ids += self.tokenizer.encode(part).ids
        return ids

    def prompt(self, example: Example) -> str:
        """The text of the prompt, with one placeholder for every span of the media."""
        rendered = _compiled(self.template).render(
            messages=example.messages[:-1],
            tools=example.tools,
            add_generation_prompt=True,
            enable_thinking=example.thought is not None,
        )
        media = iter(example.media)
        return _MEDIUM.sub(lambda match: _placeholder(next(media), match[0]), rendered)

    def encode(self, example: Example) -> Encoded:
        answer = answer_text(example.messages[-1])
        if example.thought is not None:
            answer = f"{example.thought}\n</think>\n\n{answer}"
        prompt_ids = self.encode_text(self.prompt(example))
        answer_ids = [*self.encode_text(answer), self.ids["<|im_end|>"]]
        answers = np.full(len(prompt_ids) + len(answer_ids), -1, dtype=np.int64)
        turn, start, length = 0, self.answer_start, len(self.answer_start)
        index = length
        while turn < len(example.skills) - 1:
            while prompt_ids[index - length : index] != start:
                index += 1
            end = prompt_ids.index(self.ids["<|im_end|>"], index) + 1
            answers[index:end] = turn
            turn, index = turn + 1, end
        answers[len(prompt_ids) :] = len(example.skills) - 1
        ids = np.array(prompt_ids + answer_ids, dtype=np.int64)
        grids = [medium.grid for medium in example.media for _ in range(medium.num_spans)]
        # A placeholder for each token only now: to tokenize that many takes as long as all the rest of the text.
        counts = np.ones(len(ids), dtype=np.int64)
        counts[_is_media(ids, self.media_ids)] = [rows * columns for rows, columns in grids]
        ids, answers = np.repeat(ids, counts), np.repeat(answers, counts)
        return Encoded(ids, answers, mrope_positions(ids, self.media_ids, grids), example)


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    """The template as transformers compiles it, but without the sandbox, which takes half of the time: it's our own."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def answer_text(message: dict[str, Any]) -> str:
    """What the model writes for an assistant message: its content, then its calls."""
    calls = [call_text(call["function"]) for call in message.get("tool_calls", ())]
    return "\n".join([*([message["content"]] if message["content"] else ()), *calls])


def collate(encoder: Encoder, rows: list[list[Encoded]], length: int) -> dict[str, Any]:
    """A batch of packed rows of `length` tokens.

    `input_ids` [B, T]; `segments` [B, T]: 0 is padding; `labels` [B, T]: the id to be predicted at each place, or
    IGNORE; `weights` [B, T]: how much it counts; `answers` [B, T]: the number of the answer that it belongs to, whose
    skill is in `skills`; `position_ids` [3, B, T]; and, where there are media, the entries of `vision_batch`, and what
    is `known` of each merged token (`to_know`).
    """
    shape = (len(rows), length)
    ids = np.full(shape, encoder.ids["<|endoftext|>"], dtype=np.int64)
    segments = np.zeros(shape, dtype=np.int64)
    labels, answers = np.full(shape, IGNORE, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
    positions = np.zeros((3, *shape), dtype=np.int64)
    weights = np.ones(shape, dtype=np.float32)
    skills: list[str] = []
    media: list[Media] = []
    known: list[np.ndarray] = []
    for row, encodeds in enumerate(rows):
        start = 0
        for number, encoded in enumerate(encodeds, 1):
            end = start + len(encoded.ids)
            ids[row, start:end] = encoded.ids
            segments[row, start:end] = number
            positions[:, row, start:end] = encoded.positions
            learned = np.flatnonzero(encoded.answers >= 0)
            labels[row, start + learned - 1] = encoded.ids[learned]
            answers[row, start + learned - 1] = encoded.answers[learned] + len(skills)
            weights[row, start + learned - 1] = encoder.weights[encoded.ids[learned]]
            for turn, skill in enumerate(encoded.example.skills):
                weights[row, start + np.argmax(encoded.answers == turn) - 1] *= FIRST.get(skill, 1.0)
            skills += encoded.example.skills
            media += encoded.example.media
            known += [to_know(encoded.example.media)] if encoded.example.media else []
            start = end + GAP
    batch = {
        "input_ids": torch.from_numpy(ids),
        "segments": torch.from_numpy(segments),
        "labels": torch.from_numpy(labels),
        "weights": torch.from_numpy(weights),
        "answers": torch.from_numpy(answers),
        "position_ids": torch.from_numpy(positions),
        "skills": skills,
    }
    if media:
        batch |= vision_batch(media) | {"known": torch.from_numpy(np.concatenate(known).astype(np.int64))}
    return batch


def _placeholder(media: Media, span: str) -> str:
    if media.times_s is None:
        return span
    return "".join(f"<{time:.1f} seconds>{span}" for time in media.times_s)
