"""Draws the page's examples: `python -m training.make_samples --out assets/samples`.

Writes a few pictures and clips of different sizes and formats, and samples.json with questions and their right
answers. The scenes are seeded, and only show combinations that training may show.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

from training import dialogues, files, scenes
from training.phrases import MOTION_PHRASES

MAX_BYTES = 2**20


@dataclass(frozen=True)
class Sample:
    """One file and the questions asked about it; `event` for clips, `num_items` for pictures."""

    name: str
    size: tuple[int, int]
    seed: int
    questions: tuple[str, ...]
    num_items: int = 1
    event: str = ""


SAMPLES = (
    Sample("one-shape.png", (640, 480), 11, ("What is in this picture?", "What color is it?"), 1),
    Sample("two-shapes.jpg", (800, 600), 12, ("Describe the picture.", "How many shapes are there?"), 2),
    Sample("three-shapes.png", (640, 480), 13, ("What do you see?", "How many shapes are there?"), 3),
    Sample("wide.jpg", (960, 400), 14, ("Describe this image.",), 2),
    Sample("tall.png", (360, 640), 15, ("What is in this picture?", "Where is it?"), 1),
    Sample(
        "moves-right.mp4",
        (320, 240),
        21,
        ("What happens in the video?", "Which way does it move?"),
        event="right",
    ),
    Sample("moves-up.mp4", (240, 320), 22, ("Describe the video.", "What shape is it?"), event="up"),
    Sample("changes-color.mp4", (320, 240), 23, ("What happens?", "What color does it become?"), event="change"),
    Sample("moves-down.webm", (320, 240), 24, ("What happens in the video?",), event="down"),
    Sample("moves-left.gif", (240, 180), 25, ("Which way does it move?",), event="left"),
)


def answer(scene: scenes.Picture | scenes.Clip, question: str) -> str:
    """The right answer to a question of SAMPLES."""
    if isinstance(scene, scenes.Clip):
        by_question = {
            "Which way does it move?": f"It moves {MOTION_PHRASES.get(scene.event)}.",
            "What shape is it?": f"It is a {scene.start.shape}.",
            "What color does it become?": f"It changes from {scene.start.color} to {scene.end.color}.",
        }
        return by_question.get(question) or dialogues.clip_caption(scene)
    by_question = {
        "What color is it?": f"It is {scene.items[0].color}.",
        "Where is it?": f"It is {dialogues.at(scene.items[0].place)}.",
        "How many shapes are there?": dialogues.there_are(len(scene.items), "shape"),
    }
    return by_question.get(question) or dialogues.picture_caption(scene)


def make(sample: Sample) -> tuple[bytes, scenes.Picture | scenes.Clip]:
    """The file's content and the scene it shows."""
    rng = random.Random(sample.seed)
    kind = sample.name.rsplit(".", 1)[1]
    if sample.event:
        clip = scenes.random_clip(rng, sample.size, "seen", sample.event, duration_s=3.0)
        return (files.gif_file(clip) if kind == "gif" else files.clip_file(clip, kind, fps=15)), clip
    picture = scenes.random_picture(rng, sample.size, sample.num_items, "seen", unique=True)
    return files.picture_file(picture, {"png": "PNG", "jpg": "JPEG"}[kind]), picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("assets/samples"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    entries = []
    for sample in SAMPLES:
        content, scene = make(sample)
        (out / sample.name).write_bytes(content)
        turns = [{"question": q, "answer": answer(scene, q)} for q in sample.questions]
        entries.append({"file": sample.name, "kind": "video" if sample.event else "image", "turns": turns})
    (out / "samples.json").write_text(json.dumps(entries, indent=2) + "\n")
    size = sum(path.stat().st_size for path in out.iterdir())
    if size > MAX_BYTES:
        raise ValueError(f"{out} holds {size} bytes; at most {MAX_BYTES} are wanted: make the samples smaller")


if __name__ == "__main__":
    main()
