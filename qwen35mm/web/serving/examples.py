"""The examples on an empty page: pictures and clips of assets/samples with questions that the demo model answers."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen35mm.assets import asset_path
from qwen35mm.chat.store.records import AttachmentKind
from qwen35mm.errors import ConfigError

logger = logging.getLogger(__name__)

NUM_EXAMPLES = 6


@dataclass(frozen=True)
class Sample:
    """A sample file, `image` or `video`, and a question about it."""

    path: Path
    kind: AttachmentKind
    question: str


def load_samples() -> list[Sample]:
    """Every sample with its first question; empty, with a warning in the log, if the samples can't be read."""
    try:
        folder = asset_path("samples")
        entries = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
        samples = [_sample(folder, entry) for entry in entries]
    except (ConfigError, OSError, ValueError, LookupError, TypeError):
        logger.warning("the page has no examples: the bundled samples can't be read", exc_info=True)
        return []
    return [sample for sample in samples if sample.path.is_file()]


def choose_examples(samples: list[Sample]) -> list[Sample]:
    """NUM_EXAMPLES samples: pictures, then clips, half of each if there are enough."""
    images = [sample for sample in samples if sample.kind == "image"]
    videos = [sample for sample in samples if sample.kind == "video"]
    num_videos = min(len(videos), max(NUM_EXAMPLES // 2, NUM_EXAMPLES - len(images)))
    return images[: NUM_EXAMPLES - num_videos] + videos[:num_videos]


def _sample(folder: Path, entry: dict[str, Any]) -> Sample:
    return Sample(folder / entry["file"], entry["kind"], entry["turns"][0]["question"])
