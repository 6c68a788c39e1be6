"""Draws the page's examples: `python -m training.make_samples --out assets/samples`.

Writes a few pictures and clips of different sizes and formats, and samples.json with questions and their right
answers. The scenes are set by hand, and only show combinations that training may show.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwen35mm.evaluation import files, scenes
from qwen35mm.evaluation.scenes import MOTIONS, Background, Clip, Item, Picture
from qwen35mm.evaluation.skills import clips, describing
from qwen35mm.evaluation.skills.base import Shown
from qwen35mm.evaluation.typed import item
from training.media import frame_times

MAX_BYTES = 2**20
FPS = 15
_PAPER = Background("white", (244, 243, 240), (226, 228, 233), "gradient", 1.0, 3)
_NIGHT = Background("black", (12, 12, 15), (34, 34, 40), "gradient", 1.0, 3)
_STONE = Background("gray", (128, 128, 131), (140, 140, 140), "blobs", 0.8, 5)


@dataclass(frozen=True)
class Sample:
    """A file, what it shows, and the questions with their right answers."""

    name: str
    scene: Picture | Clip
    turns: tuple[tuple[str, str], ...]


def _picture(size: tuple[int, int], *items: Item, ground: Background = _PAPER) -> Picture:
    order = list(scenes.ALL_PLACES)
    assert not any(scenes.is_held_out(i.color, i.shape, i.place) for i in items)
    return Picture(*size, ground, tuple(sorted(items, key=lambda i: order.index(i.place))))


def _moves(size: tuple[int, int], start: Item, event: str) -> Clip:
    assert not scenes.is_held_out(start.color, start.shape, event)
    dx, dy = MOTIONS[event]
    begin = replace(start, x=0.5 - 0.3 * dx, y=0.5 - 0.3 * dy)
    return Clip(*size, _PAPER, begin, replace(start, x=0.5 + 0.3 * dx, y=0.5 + 0.3 * dy), event, 0.05, 0.95, 3.0)


def _described(picture: Picture, *more: tuple[str, str], question: str = "What is in this picture?") -> tuple:
    return ((question, describing.caption(picture.items)), *more)


def _happens(clip: Clip, *more: tuple[str, str], question: str = "What happens in the video?") -> tuple:
    return ((question, clips.caption(shown(clip))), *more)


def shown(clip: Clip) -> Shown:
    return Shown(clip, frame_times(clip.duration_s, FPS), FPS)


def samples() -> list[Sample]:
    """All of them, in the page's order: what shows most comes first."""
    five = _picture(
        (720, 540), item("red", "square", "top left", "small"), item("blue", "star", "top right"),
        item("green", "circle", "center", "big"), item("orange", "diamond", "bottom left"),
        item("white", "triangle", "bottom right", "small"), ground=_STONE,
    )  # fmt: skip
    one = _picture((640, 480), item("yellow", "square", "right", "big"), ground=_NIGHT)
    two = _picture((800, 600), item("green", "circle", "top left"), item("purple", "diamond", "top right"))
    three = _picture((640, 480), item("yellow", "diamond", "top"), item("blue", "star", "left"),
                     item("red", "circle", "center"), ground=_STONE)  # fmt: skip
    wide = _picture((960, 400), item("blue", "cross", "left"), item("orange", "star", "bottom right"))
    tall = _picture((360, 640), item("purple", "star", "top"))
    right = _moves((320, 240), item("red", "star", "center"), "right")
    up = _moves((240, 320), item("red", "square", "center"), "up")
    down = _moves((320, 240), item("black", "circle", "center"), "down")
    left = _moves((240, 180), item("blue", "diamond", "center"), "left")
    green, red = item("green", "cross", "center"), item("red", "cross", "center")
    change = Clip(320, 240, _PAPER, green, red, "change", 0.5, 0.5, 3.0)
    star = item("blue", "star", "left")
    appears = Clip(320, 240, _PAPER, star, star, "appear", 0.5, 0.5, 5.0)
    return [
        Sample("five-shapes.png", five, (
            ("How many shapes are there?", "There are five shapes."),
            ("What is the largest shape?", "The green circle is the largest."),
            ("Is there a cross?", "No, there is no cross."),
            ("Where is the blue star?", "The blue star is at the top right."),
            ("What is at the bottom left?", "An orange diamond is at the bottom left."),
        )),
        Sample("two-shapes.jpg", two, _described(two, ("How many shapes are there?", "There are two shapes."),
                                                 question="Describe the picture.")),
        Sample("one-shape.png", one, _described(one, ("What color is it?", "It is yellow."))),
        Sample("three-shapes.png", three, _described(
            three, ("How many shapes are there?", "There are three shapes."),
            ("Are there more stars than crosses?", "Yes, there are more stars."), question="What do you see?")),
        Sample("wide.jpg", wide, _described(wide, question="Describe this image.")),
        Sample("tall.png", tall, _described(tall, ("Where is it?", "It is at the top."))),
        Sample("moves-right.mp4", right, _happens(right, ("Which way does it move?", "It moves to the right."))),
        Sample("changes-color.mp4", change, _happens(change, (
            "What color does it become?", "It changes from green to red."), question="What happens?")),
        Sample("moves-left.gif", left, (("Which way does it move?", "It moves to the left."),)),
        Sample("moves-up.mp4", up, _happens(up, ("What shape is it?", "It is a square."),
                                            question="Describe the video.")),
        Sample("moves-down.webm", down, _happens(down)),
        Sample("appears.mp4", appears, _happens(appears, (
            "When does the star appear?", f"It appears at {clips.seconds(shown(appears)):.1f} seconds."))),
    ]  # fmt: skip


def content(sample: Sample) -> bytes:
    """The sample's file."""
    kind = sample.name.rsplit(".", 1)[1]
    writers: dict[str, Callable[[Any], bytes]] = {
        "png": lambda scene: files.picture_file(scene, "PNG"),
        "jpg": lambda scene: files.picture_file(scene, "JPEG"),
        "gif": files.gif_file,
        "mp4": lambda scene: files.clip_file(scene, "mp4", FPS),
        "webm": lambda scene: files.clip_file(scene, "webm", FPS),
    }
    return writers[kind](sample.scene)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("assets/samples"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    entries = []
    for sample in samples():
        (out / sample.name).write_bytes(content(sample))
        turns = [{"question": question, "answer": answer} for question, answer in sample.turns]
        kind = "video" if isinstance(sample.scene, Clip) else "image"
        entries.append({"file": sample.name, "kind": kind, "turns": turns})
    (out / "samples.json").write_text(json.dumps(entries, indent=2) + "\n")
    size = sum(path.stat().st_size for path in out.iterdir())
    if size > MAX_BYTES:
        raise ValueError(f"{out} holds {size} bytes; at most {MAX_BYTES} are wanted: make the samples smaller")


if __name__ == "__main__":
    main()
