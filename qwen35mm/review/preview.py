"""What a preview shows, on the page and in the terminal, as JSON values."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from qwen35mm.captioning.cost import Range
from qwen35mm.captioning.items import Failed
from qwen35mm.captioning.preview import Preview, Row
from qwen35mm.captioning.records import Caption, printable
from qwen35mm.captioning.texts.trainers import SHORTENED, TOO_LONG, Length
from qwen35mm.review.statistics import num_words
from qwen35mm_preprocess import MediaKind


@dataclass(frozen=True)
class Column:
    """A prompt of a preview.

    Attributes:
        title: what a person calls it, with the adapter's name.
        command: runs with it alone.
    """

    title: str
    command: str


@dataclass(frozen=True)
class Shown:
    """A preview with the commands that it leads to.

    Attributes:
        together: the command for all prompts in one pass; None if a run asks only one of them for each medium.
    """

    preview: Preview
    columns: Sequence[Column]
    together: str | None

    def summary(self) -> dict[str, Any]:
        """What is known so far of the media, the prompts and the whole run, with its cost in seconds."""
        preview, sample = self.preview, self.preview.sample
        tokens = preview.job.style.length
        return {
            "title": ", ".join(map(printable, preview.job.sources)),
            "state": preview.state,
            "asked": preview.num_asked,
            "over": sum(row.is_over for row in preview.rows),
            "num": _pairs(preview.num),
            "tried": dict(sorted(preview.num_tried.items())),
            "unreadable": sample.num_unreadable,
            "named": [[printable(each.name), each.message] for each in sample.unreadable],
            "failed": sum(row.failed is not None for row in preview.rows),
            "not_counted": preview.not_counted,
            "most_tokens": None if tokens is None else tokens.max_tokens,
            "columns": [self._column(at, column) for at, column in enumerate(self.columns)],
            "together": None
            if self.together is None
            else {"command": self.together, "cost": _pairs(preview.costs(None))},
        }

    def rows(self, since: int = 0) -> list[dict[str, Any]]:
        """The rows that changed after the preview's clock had this value."""
        return [self._row(number, row) for number, row in enumerate(self.preview.rows) if row.changed > since]

    def _column(self, at: int, column: Column) -> dict[str, Any]:
        answers = [row.answers[at] for row in self.preview.rows]
        cells = [self._cell(each, 0.0) for each in answers if isinstance(each, Caption)]
        most = None if self.preview.job.style.length is None else self.preview.job.style.length.max_tokens
        return {
            "title": column.title,
            "prompt": self.preview.prompts.questions[at].text,
            "command": column.command,
            "cost": _pairs(self.preview.costs(at)),
            "words": _lengths([cell["words"] for cell in cells]),
            "tokens": None if most is None else _lengths([cell["tokens"] for cell in cells]),
            "failed": sum(isinstance(each, Failed) for each in answers),
            "shortened": sum(not {SHORTENED, TOO_LONG}.isdisjoint(cell["flags"]) for cell in cells),
        }

    def _row(self, number: int, row: Row) -> dict[str, Any]:
        part = row.item.part
        return {
            "number": number,
            "name": printable(row.item.name),
            "kind": row.item.kind,
            "part": None if part is None else [part.start_s, part.end_s],
            "failed": None if row.failed is None else row.failed.message,
            "cells": [self._cell(*each) for each in zip(row.answers, row.seconds, strict=True)],
        }

    def _cell(self, answer: Caption | Failed | None, seconds: float) -> Any:
        if answer is None:
            return None
        if isinstance(answer, Failed):
            return {"failed": answer.message, "seconds": seconds}
        length = self.preview.job.style.length
        return {
            "text": answer.text,
            "flags": [printable(flag) for flag in answer.flags],
            "seconds": seconds,
            "words": num_words(answer.text),
            "tokens": None if length is None else _num_tokens(length, answer.text),
        }


@functools.lru_cache(maxsize=10_000)
def _num_tokens(length: Length, text: str) -> int:
    """A page asks for it each second."""
    return length.count(text)


def _pairs(ranges: Mapping[MediaKind, Range]) -> dict[str, list[float]]:
    return {kind: [each.low, each.high] for kind, each in sorted(ranges.items())}


def _lengths(lengths: Sequence[int]) -> list[float] | None:
    """The least, the median and the largest."""
    return [min(lengths), median(lengths), max(lengths)] if lengths else None
